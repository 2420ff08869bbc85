"""Text to documents, units of ids and batches. This package knows nothing of the model and never imports torch.

sources, readers, python_chat              where text comes from     units     documents to ids in files
tokenizer, added_tokens, tokenizer_json    text <-> ids              batches   the order in which batches take the ids
corpus, split                              a text to train on        chat, conversations   the same of messages
"""
