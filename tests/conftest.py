"""What every test shares. The leak check comes with the plugin named in pyproject.toml."""

from hypothesis import settings

# Examples that start processes take as long as the machine lets them; pytest's timeout bounds the whole test.
settings.register_profile("torchcrew", deadline=None, print_blob=True)
settings.load_profile("torchcrew")
