"""Text to documents, units of ids and batches. This package knows nothing of the model and never imports torch.

sources, readers   where text comes from            units     documents to ids in files, by many processes
corpus             all of it, kept between runs     split     training, validation, duplicates
tokenizer          text <-> ids                     batches   the order in which batches take the ids
chat               conversations <-> text
"""
