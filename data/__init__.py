"""Text to documents, ids and batches. This package knows nothing of the model and never imports torch.

settings, sources, readers, python_chat    where text comes from       tokens    documents to ids in a file
tokenizer, special_tokens                  text <-> ids                batches   the order in which batches take the ids
tokenizer_training, tokenizer_json         SentencePiece's part        chat      messages to ids
corpus, split                              a text to train on          conversations   messages to train on
"""
