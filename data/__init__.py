"""Text to documents, chunks, tokens and batches. This package knows nothing of the model and never imports torch.

corpus, readers   where text comes from               chunks, packing   documents to ids in a file
split             training, validation, duplicates    tokens, cache     all of it, kept on disk between runs
tokenizer         text <-> ids                        batches           the order in which batches take the ids
"""
