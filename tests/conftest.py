"""For every test process and what it starts: no model hub is ever asked."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is first imported
