"""Text to tokens to batches. This room knows nothing of the model and never imports torch.

corpus    where text comes from                      split     which documents are for training, which for validation
tokenizer text <-> ids                               tokens    ids on disk, and the order in which batches take them
"""
