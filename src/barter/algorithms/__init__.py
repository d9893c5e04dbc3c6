"""The algorithms, one file for each paper, and the registry of their names.

Files that name no paper hold what several algorithms share: `broadcast`, `condensation`,
`one_width`, `partial` and `public`.
"""

from __future__ import annotations

from typing import Any

from barter.algorithms.central import Central
from barter.algorithms.dense import DENSE
from barter.algorithms.dffke import DFFKE
from barter.algorithms.dfrd import DFRD
from barter.algorithms.dsfl import DSFL
from barter.algorithms.fedaf import FedAF
from barter.algorithms.fedavg import FedAvg
from barter.algorithms.fedbn import FedBN
from barter.algorithms.feddf import FedDF
from barter.algorithms.feddistill import FedDistill
from barter.algorithms.feddm import FedDM
from barter.algorithms.feddropout import FedDropout
from barter.algorithms.feddyn import FedDyn
from barter.algorithms.fedfree import FedFree
from barter.algorithms.fedftg import FedFTG
from barter.algorithms.fedgen import FedGen
from barter.algorithms.fedgh import FedGH
from barter.algorithms.fediod import FedIOD
from barter.algorithms.fedkd import FedKD
from barter.algorithms.fedktl import FedKTL
from barter.algorithms.fedmd import FedMD
from barter.algorithms.fedproto import FedProto
from barter.algorithms.fedprox import FedProx
from barter.algorithms.fedrolex import FedRolex
from barter.algorithms.fedtgp import FedTGP
from barter.algorithms.fedzge import FedZGE
from barter.algorithms.fedzkt import FedZKT
from barter.algorithms.fml import FML
from barter.algorithms.heterofl import HeteroFL
from barter.algorithms.lgfedavg import LGFedAvg
from barter.algorithms.local import Local
from barter.algorithms.mhat import MHAT
from barter.algorithms.moments import ClassMoments
from barter.algorithms.moon import MOON
from barter.algorithms.perfedavg import PerFedAvg
from barter.algorithms.pfedla import PFedLA
from barter.core.algorithm import Algorithm

__all__ = [
    "ALGORITHMS",
    "DENSE",
    "DFFKE",
    "DFRD",
    "DSFL",
    "FML",
    "MHAT",
    "MOON",
    "Central",
    "ClassMoments",
    "FedAF",
    "FedAvg",
    "FedBN",
    "FedDF",
    "FedDM",
    "FedDistill",
    "FedDropout",
    "FedDyn",
    "FedFTG",
    "FedFree",
    "FedGH",
    "FedGen",
    "FedIOD",
    "FedKD",
    "FedKTL",
    "FedMD",
    "FedProto",
    "FedProx",
    "FedRolex",
    "FedTGP",
    "FedZGE",
    "FedZKT",
    "HeteroFL",
    "LGFedAvg",
    "Local",
    "PFedLA",
    "PerFedAvg",
]

ALGORITHMS: dict[str, type[Algorithm[Any, Any]]] = {
    "dffke": DFFKE,
    "fedaf": FedAF,
    "fedzge": FedZGE,
    "dfrd": DFRD,
    "fedftg": FedFTG,
    "dense": DENSE,
    "fedzkt": FedZKT,
    "fediod": FedIOD,
    "fedfree": FedFree,
    "feddm": FedDM,
    "heterofl": HeteroFL,
    "feddropout": FedDropout,
    "fedrolex": FedRolex,
    "fedproto": FedProto,
    "fedtgp": FedTGP,
    "feddistill": FedDistill,
    "lgfedavg": LGFedAvg,
    "fedmd": FedMD,
    "dsfl": DSFL,
    "mhat": MHAT,
    "feddf": FedDF,
    "fml": FML,
    "fedkd": FedKD,
    "fedgh": FedGH,
    "fedgen": FedGen,
    "fedktl": FedKTL,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedbn": FedBN,
    "moon": MOON,
    "feddyn": FedDyn,
    "perfedavg": PerFedAvg,
    "pfedla": PFedLA,
    "moments": ClassMoments,
    "local": Local,
    "central": Central,
}
