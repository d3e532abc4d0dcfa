"""What costs a program more than it has to, and what to write instead.

In the order of reading:

- `rules`: all rules, in the order of a report.
- `arguments`: arguments that are whole.
- `batch`: batches that are not split.
- `values`: values between arguments and results that are whole.
- `work`: products that devices compute alike.
- `constraints`: logical constraints of Flax that do nothing.
- `rematerialization`: what the partitioner warns of.
"""
