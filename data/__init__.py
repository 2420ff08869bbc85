"""Text to documents, ids and batches. This package knows nothing of the model and never imports torch."""
