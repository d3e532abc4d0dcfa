"""Parsed partition specs, for code that works on the specs of a jaxpr's equations."""

from spmd._spec import (
    REPLICATED as REPLICATED,
    ParsedPartitionSpec as ParsedPartitionSpec,
    SpecSync as SpecSync,
)
