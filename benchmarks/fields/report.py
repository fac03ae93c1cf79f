"""TODO."""


def report(store, name, folder):
    return {}


Look = None
