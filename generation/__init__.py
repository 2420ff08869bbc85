"""From a prompt to text: prefill, decoding, sampling, streaming. Depends on model/ and data/, not on training/.

Imports nothing here, so that `generation.settings` can be imported without torch.
"""
