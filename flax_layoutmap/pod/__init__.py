"""Plan a step on a pod slice without devices: memory, collectives, fit."""

from flax_layoutmap.pod._plan import compile as compile
from flax_layoutmap.pod._plan import plan as plan
from flax_layoutmap.pod._report import PodReport as PodReport
from flax_layoutmap.pod._report_text import Collective as Collective
from flax_layoutmap.pod._report_text import Memory as Memory
from flax_layoutmap.pod._topologies import Generation as Generation
from flax_layoutmap.pod._topologies import Topology as Topology
from flax_layoutmap.pod._topologies import topology as topology
