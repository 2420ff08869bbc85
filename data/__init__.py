"""Text to documents, units of ids and batches. This package knows nothing of the model and never imports torch.

sources, readers, python_chat   where text comes from      corpus, split   training, validation, duplicates
tokenizer, added_tokens         text <-> ids               units           documents to ids in files
train_tokenizer, tokenizer_json of SentencePiece           batches         the order in which batches take the ids
chat, conversations             messages to ids, and to rows of them
"""
