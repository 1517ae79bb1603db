"""For every test process and what it starts: no model hub is ever asked, and torch computes with one thread, since several
tests run at the same time; gRPC is as silent as in the commands.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when grpc is first imported
