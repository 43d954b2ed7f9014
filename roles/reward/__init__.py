"""What process and outcome reward roles share: reading batches, models of transformers, judges."""
