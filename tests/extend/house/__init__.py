"""A package of somebody's own: a family, an expert backend, a dispatcher, a data source and a loss that automoe has not.

Used by ``plugins=[house]``. Modules that import torch are named and not imported: automoe reads this file before it
knows whether the configuration is valid.
"""

from automoe.config.plugins import register

register("data.kind", "csv", "house.csv_source:CSV")
register("model.family", "dots1", "house.dots1:FAMILY")
register("moe.dispatcher", "ring", "house.ring:make_ring")
register("moe.experts", "bmm", "house.bmm_experts:bmm_experts")
register("train.loss", "focal", "house.focal:focal")
register("train.loss", "plain", "house.focal:plain")
