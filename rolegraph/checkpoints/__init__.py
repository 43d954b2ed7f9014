"""What a run leaves so that it can go on: checkpoints of roles and driver, and the rules for resuming from them."""
