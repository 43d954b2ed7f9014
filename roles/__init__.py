"""The concrete role classes: what users import and subclass."""
