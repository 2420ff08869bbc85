"""From a prompt to text: prefill, decode, sampling, streaming. Knows the model and tokenizers, nothing of training.

Nothing is imported here, so that `generation.settings` can be read without torch.
"""
