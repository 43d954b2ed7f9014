"""rolegraph: RL post-training of language models as a graph of Ray actors."""
