from tests.ablation.conftest import config  # noqa: F401 - a fixture
