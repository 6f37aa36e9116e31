"""Local training: loop, evaluation, optimisers, augmentation."""
