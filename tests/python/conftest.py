"""Property tests draw the same examples in every run; KDA_TEST_EXAMPLES=N draws N times as many, new ones each time."""

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("more", deadline=None, print_blob=True)
settings.load_profile("more" if "KDA_TEST_EXAMPLES" in os.environ else "same")
