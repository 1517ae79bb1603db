"""Other systems, measured in the same run: `edit-lab bench rivals`, and hivemind's compressors for `edit-lab bench codecs`.

Owns: their environments, and one script for each. The scripts are started by the Python of an environment of their own, so they
import the other system and nothing of this project. In reading order:

contest                measures them and this project
environments           where they are installed, with pinned versions
gloo_all_reduce        torch.distributed
torchft_diloco         torchft's DiLoCo
hivemind_averager      hivemind's averager
hivemind_compressors   its compressors
flower_round           Flower's FedAvg, with its deprecated server
flower_superlink       the same, with SuperLink and SuperNodes
"""
