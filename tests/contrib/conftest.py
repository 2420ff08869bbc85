"""Tokenizers that the tests of data/ have too."""

from tests.data.conftest import library_text, llama, qwen, qwen_folder  # noqa: F401 - fixtures
