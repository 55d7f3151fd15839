"""Alpa, in a version to read: two levels of search for the parallel plan of a model.

Inner level (`intra_operator`): on one mesh of devices, an integer linear programme chooses the sharding of every
tensor. Outer level (`inter_operator`): dynamic programming cuts the layers into pipeline stages and gives each its
submesh.

Nothing is measured here; costs are of the α + β × bytes model and of counted FLOPs.

Source: Zheng et al. 2022, "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning" (OSDI
22, arXiv 2201.12023).
"""
