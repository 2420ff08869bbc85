"""Tokenizers that the tests of data/ have too."""

from tests.data.conftest import llama, qwen, qwen_folder  # noqa: F401 - fixtures
