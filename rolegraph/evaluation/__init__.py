"""How good the policy is while it is trained, and afterwards: named sets of prompts with sampling and rewards of their
own."""
