"""Text to documents, ids and batches. This package knows nothing of the model and never imports torch.

settings, sources, readers, python_chat       where text comes from       train_tokenizer, tokens   its tokenizer, ids
tokenizer, special_tokens, tokenizer_json     text <-> ids                batches   the order in which batches take ids
corpus, split                                 a text to train on          chat, conversations   the same of messages
"""
