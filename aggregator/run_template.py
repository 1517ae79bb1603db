"""The run.toml that `edit-coordinator init` writes: every setting with its meaning; what is commented out has its default."""

__all__ = ["RUN_TOML", "template"]

RUN_TOML = """\
# The settings of one run. Peers receive all of them but [server] when they join.
# entry:NAME names a plug-in, code of an installed package (docs/plugins.md); `--allow NAME` then writes a section plugins.
# A line that begins with "#key = " shows a default: remove the "#" to change it. An unknown key, a wrong value, or a key that
# the other settings would make ineffective is an error that names it.
name = "run"                    # The beginning of the run's id.
seed = 0                        # Seeds the initial parameters and each peer's order of the data.

[model]
# With builtin:gpt, a peer with another model is refused. With hf: and entry:, the first peer sends the names and shapes.
name = "builtin:gpt"            # builtin:gpt, hf:MODEL_TYPE (transformers), entry:NAME (of peers, or of own loops: any name).
layers = 4                      # Transformer blocks; layers, heads and width are for builtin:gpt.
heads = 4                       # Attention heads; must divide width.
width = 128                     # Size of the hidden state.
context = 128                   # Tokens in a sequence.
vocabulary = 256                # Number of different tokens; 256 for bytes.
#options = {}                   # Fields of the transformers configuration, or options for the entry point.

[inner]                         # The inner optimizer of every peer, with warm-up and cosine decay.
#optimizer = "adamw"            # adamw, muon (with AdamW for embeddings, norms and head), sgd; torch:NAME or entry:NAME.
#state = "fp32"                 # AdamW's moments: fp32, int8 or int4, the last two with the extra lowbit at each peer.
#options = {}                   # Further arguments of torch:NAME or entry:NAME.
#momentum = 0.95                # Momentum of muon and sgd.
lr = 2e-3                       # The highest learning rate.
#final_lr_ratio = 0.1           # The last learning rate, as a share of lr.
warmup_steps = 50               # Inner steps until the learning rate is lr.
#weight_decay = 0.1             # Weight decay of matrices.
#beta1 = 0.9                    # AdamW's first beta.
#beta2 = 0.95                   # AdamW's second beta.
batch_size = 4                  # Sequences in a micro-batch of one peer.
#accumulation = 1               # Micro-batches in an inner step.
#batch_growth = 1               # A peer's batch may double up to this many times itself, by a norm test; 1: it stays.
#norm_test = 0.8                # eta: doubles it where the gradient's variance exceeds eta^2 times its square.
#clip_norm = 1.0                # Clips the gradient to this norm; 0 turns clipping off.
#autocast = true                # Computes in bf16 where the device can.

[sync]                          # When peers exchange, and how they apply an update.
every = 128                     # H: inner steps between two exchanges of the same fragment.
#milestones = []                # H from later outer steps on: [[100, 32], [400, 128]] makes it 32 from outer step 100 on.
outer_steps = 1000              # The run ends after this many outer steps.
#tokens = 0                     # The run ends once this many tokens are merged, if that is earlier; 0 for no bound.
#groups = 1                     # P: exchanges one of P groups of fragments every H / P inner steps (streaming).
#pattern = "strided"            # How fragments are grouped: strided (every P-th) or sequential (neighbours).
#mode = "blocking"              # What a peer does during an exchange: blocking, forward, delayed or eager.
#delay = 1                      # Inner steps from a contribution to applying its update, with delayed and eager.
#mix = "replay"                 # With delayed, what becomes of the progress meanwhile: replay, replace or lerp.
#alpha = 0.5                    # With lerp, the share of the local parameters that is kept.
#strict = false                 # Never trains on without an outcome, so that an interrupted run ends with the same bits.
#schedule = "steps"             # When a peer contributes: every H inner steps (steps), or every time_s seconds (time).
#time_s = 600.0                 # Seconds from an applied update to the next contribution, with schedule = "time".
#dylu = false                   # Scales each peer's H by its measured speed, so that all contribute together.

[penalty]                       # Judges contributions: anomaly elimination, weighted averaging, clipping (EDiT).
enabled = true                  # false: a plain mean of all contributions that are finite.
#detector = "level"             # level: what is judged and learned follows the peers; edit: the paper's rule; or entry:NAME.
#options = {}                   # For a detector entry:NAME.
#alpha = 0.02                   # Rate of the moving mean and variance of each peer's norm.
#delta = 3.0                    # A norm this many standard deviations above what is usual is anomalous.
#step_power = 0.5               # A norm is expected to grow with this power of the inner steps behind it.
#relearn = 3                    # This many anomalies in a row that agree are a peer's new usual norm.
#max_ratio = 10.0               # A norm this many times the round's median is always anomalous (3 peers or more).
#max_share = 1.5                # No share exceeds max_share / M of M accepted contributions.
#observations = 10              # W: norms of a peer before its contributions are judged.
#temperature = 1.0              # Temperature of the softmax that turns norms into weights.
#clip = 10.0                    # The largest norm of a merged fragment; 0 turns clipping off.
#norm = "relative"              # The norm in the softmax: relative (to the round's median), raw or per_sqrt_step.
#idle_ratio = 0.01              # A norm below this share of the round's largest gets weight 0; 0 turns it off.
#weighting = "uniform"          # Weights with enabled = false: uniform, tokens or tokens2_per_step.
#staleness = 0.5                # A contribution s outer steps old has its weight multiplied by (1 + s) ** -staleness.
#damping = 0.0                  # That exponent with rounds.merging = "arrivals".

[audit]                         # A signed log of who contributed what, and what came out: docs/audit.md.
#enabled = false                # true: peers sign their contributions; the coordinator, or each member of a swarm, keeps a log.
#keep_contributions = 0         # Outer steps whose contributions are kept, for `edit-coordinator audit replay`.
#cosign = true                  # Peers also sign the heads of the log that they have seen.

[governance]                    # A changed configuration counts only with approvals, and peers check that: docs/site-policy.md.
#approvers = []                 # Members that approve changes, by name, or as `edit-peer fingerprint` prints name and key.
#needed = 0                     # How many of them a change needs.

[secagg]                        # Secure aggregation: only the sum of contributions is seen; docs/secure-aggregation.md.
#enabled = false                # true: peers mask their contributions; set rounds.quorum to min_peers or more.
#bits = 16                      # Bits of a masked element: 8, 16 or 32.
#min_peers = 3                  # No sum of fewer peers is ever opened.
#max_peers = 16                 # No round has more peers; the grid leaves room for that many.

[privacy]                       # Differential privacy: docs/privacy.md.
#level = "none"                 # example: DP-SGD at each peer; organisation: the coordinator adds noise to the sum.
#delta = 0.0                    # The probability with which the bound may fail; below 1 / examples, or n0 ** -1.1.
#epsilon_max = 0.0              # A peer, or the whole run, stops before its epsilon exceeds this.
#noise_multiplier = 0.0         # The noise's standard deviation over clip.
#clip = 1.0                     # The largest norm of one example's gradient, or of an organisation's contribution.
#sampling = "poisson"           # poisson: each example is in a step by chance; shuffle: each once in a pass.
#unit = "sequence"              # What an example is: sequence or document.
#denominator = 0                # organisation: n0, by which the sum is divided; 0: rounds.start_peers.
#accept_noise = false           # organisation: true: train even if the noise is over 10 times a contribution's length.

[robust]                        # For runs in which some peers may be hostile: docs/robust-merging.md.
#rule = "none"                  # geometric_median, centered_clip, multi_krum, clip, median, trimmed_mean; none: weighted mean.
#hostile = 0                    # f: how many peers may be hostile; the quorum is then at least 2 f + 1 (multi_krum: 2 f + 3).
#mixing = "nnm"                 # nnm: each contribution is first replaced by the mean of its nearest ones; or none.
#equalise = true                # Makes all contributions as long as their median.
#scope = "fragment"             # model: one set of weights for all fragments of an outer step, merged once all are in.
#radius = 0.0                   # The distance to which centered_clip shortens; 0: the median distance.
#trust = "none"                 # anchors: weigh by the cosine to the anchors' mean; loss: by what scorers measure.
#anchors = []                   # The organisations that are trusted: their peers' names up to the first dot.

[outer]                         # The outer optimizer. docs/outer-settings.md says how to choose it.
#algorithm = "mean"             # mean: one model for all; gossip: an outer step of two peers, in a swarm.
#preset = "manual"              # auto, as if none is written: optimizer, lr and momentum follow from the run's length.
#chosen = ""                    # What auto chose, and why: peers and the run's status see it here; never write it.
#optimizer = "nesterov"         # sgd, nesterov, co2, adam, yogi or delayed_nesterov; or entry:NAME.
#lr = 0.8                       # Outer learning rate. EDiT: 0.8 with momentum 0.85; DiLoCo: 0.7 with 0.9.
#momentum = 0.85                # Outer momentum, for nesterov, co2, delayed_nesterov; short runs want less, 0.6.
#momentum_warmup = 0            # Outer steps of a fragment in which the momentum rises from 0, for nesterov and co2.
#momentum_restarts = []         # Outer steps of a fragment before which the momentum of nesterov and co2 is set to zero.
#mean_steps = 0                 # The first outer steps are plain means, lr 1 without momentum: a warm-up with every = 1.
#correlation = 0.0              # Of successive pseudo-gradients: above 0, nesterov's lr follows H with sync.milestones.
#gap_penalty = 1.0              # co2 divides the pseudo-gradient by it.
#momentum_clip = 0.0            # co2 clips each element of its momentum to this magnitude; 0: it does not.
#beta1 = 0.9                    # First beta of adam and yogi.
#beta2 = 0.99                   # Second beta of adam and yogi.
#eps = 1e-3                     # Epsilon of adam and yogi.
#period = 4                     # Outer steps between two changes of delayed_nesterov's momentum.
#c = 0.0                        # Share of the momentum that delayed_nesterov applies in between.
#options = {}                   # For an optimizer entry:NAME.
#merger = "mean"                # How weighted contributions are combined: mean, or entry:NAME.
#merger_options = {}            # For a merger entry:NAME.
#direction = "mean"             # How contributions are averaged: mean, or rda (directions and lengths separately).
#correct = "none"               # heloco shrinks or turns the components that go against the momentum.

[average]                       # A mean of the outer parameters over outer steps, for an export with --averaged.
#kind = "none"                  # ema: exponential moving average; last: the mean of the last outer steps; none.
#decay = 0.9                    # The share of the average that ema keeps at each outer step.
#last = 2                       # How many outer steps last takes; each beyond the first costs 4 bytes per parameter.

[gossip]                        # An outer step of two peers, with outer.algorithm = "gossip" (NoLoCo).
#lr = 0.7                       # How far both follow the mean of their contributions.
#momentum = 0.5                 # Momentum of each peer's own outer parameters.
#mixing = 0.7                   # How fast the outer parameters of a pair approach their mean; below 2 (1 - momentum^2).
#codec = "bf16"                 # The codec of the outer parameters that a peer sends: bf16 or fp32.
#settle_every = 0               # Outer steps after which all peers' outer parameters become their mean; 0: only at the end.
#deadline_s = 60.0              # Seconds that a peer waits for its partner, or for the others where all settle.

[codec]                         # fp32, bf16, fp16, int8, int4, e3m0, stat2, sign, topk, top1, sdd: docs/codecs.md; entry:NAME.
up = "int8"                     # For contributions.
down = "bf16"                   # For updates.
#up_decay = 1.0                 # Share of what a contribution left out that is added to the next one; 0: nothing is.
#down_decay = 1.0               # The same for updates.
#up_residual = "fp32"           # Where peers keep what contributions left out: fp32, bf16, int8 (4, 2, 1 bytes), or local (0).
#record = ""                    # For what is journalled and given to the outer optimizer; "": fp32 with fp32 updates, or bf16.
#down_residual = "int8"         # How the coordinator keeps what updates and records left out: fp32, bf16 or int8.
#fragments = {}                 # Others for fragments by name: { "embedding*" = { up = "int8", down = "bf16" } }.

[rounds]                        # When a round opens and closes.
# A live peer that contributed nothing in two rounds in a row is optional: rounds do not wait for it until it contributes.
start_peers = 1                 # Live peers before the first round opens.
quorum = 1                      # A round with fewer contributions never commits; at most start_peers.
#floor_s = 5.0                  # The shortest deadline of a round, in seconds.
ceiling_s = 600.0               # The longest deadline of a round, in seconds.
#spread = 6.0                   # A peer may take its median time plus this many times the median absolute deviation.
#wait = "times"                 # With the quorum in, waits for each peer's own deadline (times), or only grace_s (slack).
#grace_s = 2.0                  # How much longer a round waits then, in seconds.
#merging = "rounds"             # arrivals merges each contribution as soon as it is complete.
#max_staleness = 0              # A contribution may be merged up to this many outer steps late; 0: only in its own round.

[membership]
#heartbeat_s = 2.0              # Seconds between two reports of a peer; by default 1.0 in a swarm.
#lease_s = 6.0                  # A peer that is silent for this many seconds is lost; by default 3.0 in a swarm.
#share_losses = false           # Whether observers and other peers see a peer's training loss and metrics. The operator does.
#consent = false                # A peer takes part only once its site has consented to this configuration (edit-peer consent).

[storage]
#buffer_bytes = 268435456       # Memory for contributions, a quarter of it for what is on its way. The rest lies on disk.
#checkpoint_every = 20          # Outer steps between two checkpoints of the coordinator.
#keep_checkpoints = 2           # How many checkpoints are kept; more with audit.keep_contributions.
#keep_updates = 4               # How many updates are kept for peers that missed a commit (of each group).

# A swarm has no coordinator: write [swarm] in place of [aggregators] and [server], and start it with `edit-peer swarm start`.
# Its keys and their defaults (docs/swarm.md explains them): parts = 4, heartbeat_s = 0.25, lease_s = 1.0, forget_s = 60.0,
# discovery = "auto", verify = 0, verify_s = 60.0
[aggregators]
#addresses = []                 # HOST:PORT of each further aggregator that has a share of the fragments.

[server]                        # Of the coordinator itself; never sent to peers.
listen = "127.0.0.1:7700"       # HOST:PORT for members: control and data, mutual TLS.
enrol_listen = "127.0.0.1:7701" # HOST:PORT where invitations are redeemed.
advertise = ["127.0.0.1", "localhost"]  # The names or addresses that peers connect to; the certificate names them.
#metrics_listen = ""            # HOST:PORT of /metrics, /healthz and /readyz, plain HTTP without a password; "": none.
"""


def template(peers: int = 1) -> str:
    """Return run.toml for so many peers: the first round waits for all of them, and half of them are a quorum."""
    text = RUN_TOML
    for key, value in (("start_peers", peers), ("quorum", (peers + 1) // 2)):
        text = text.replace(f"\n{key} = 1".ljust(33), f"\n{key} = {value}".ljust(33), 1)
    return text
