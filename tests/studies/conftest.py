from tests.ablation.conftest import config, finish, row  # noqa: F401 - fixtures
