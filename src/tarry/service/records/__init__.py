"""The records of the service: API keys, secrets, heartbeats and others, one module for each kind.

A module has the rules of its kind, written once for all stores. It keeps its records with
`RecordCollection`, on the operations of `tarry.service.store.RecordStore`.
"""
