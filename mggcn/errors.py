"""Error classes: every message says what was expected, what came and what to do."""


class MggcnError(Exception):
    """Base of all errors that mggcn raises on purpose."""

    exit_code = 1


class ConfigError(MggcnError):
    """A setting is unknown, out of range or contradicts another."""

    exit_code = 2


class GraphError(MggcnError):
    """A graph, its features, labels or splits are malformed."""

    exit_code = 2


class GraphWarning(UserWarning):
    """A graph may not be the one that was meant; nothing is wrong with it otherwise."""


class StoreError(MggcnError):
    """A folder is not a graph store, is damaged, or cannot be written."""

    exit_code = 2


class PlanError(MggcnError):
    """The planned memory does not fit."""

    exit_code = 2


class RunError(MggcnError):
    """A run folder cannot be used: missing, incomplete or already taken."""

    exit_code = 2


class TrainError(MggcnError):
    """Training cannot go on, for example because the loss is no longer finite."""


class CommError(MggcnError):
    """Another rank failed, did not arrive in time, or the transport broke."""


class BackendError(MggcnError):
    """A device, library or kernel that the run needs is missing."""
