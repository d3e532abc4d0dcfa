"""pmap: one program on several devices, each with its slice of the arguments."""

from spmd._pmap._api import PmapFunction as PmapFunction, pmap as pmap
