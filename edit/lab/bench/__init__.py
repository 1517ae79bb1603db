"""`edit-lab bench`, and real runs for the commands in benchmarks/.

Owns: measuring this project beside a limit or other systems in the same run. In reading order:

command        measures, prints, writes: what the commands do
turns          processes that exchange when they are told to, timed from outside
exchange       one exchange of a whole model, beside raw gRPC
exchange_peer  a peer of it
raw_stream     the raw gRPC
codecs         the speed of every codec, beside a plain copy
links          throughput over long fat links, and heartbeats over slow ones
rivals/        other systems, in environments of their own
results        rows with their circumstances, as lines of JSON and tables
measured_run   a coordinator and peers as processes, and the same peers without any exchange
"""
