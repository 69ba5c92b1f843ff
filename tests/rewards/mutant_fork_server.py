"""The fork server with one planted bug, named by the environment variable MUTANT."""

import os

from hone.rewards import fork_server, score, worker

MUTANTS = {
    "": lambda: None,
    "no deadline": lambda: setattr(fork_server.ForkServer, "_kill_overdue", lambda self: 0.1),
    "no memory limit": lambda: setattr(worker.resource, "setrlimit", lambda *_: None),
    "orphans live": lambda: (
        setattr(fork_server, "_kill", lambda child: None),
        setattr(worker, "_kill_children", lambda *, keep: None),
        setattr(fork_server, "_SHUT_DOWN_S", 0.1),
    ),
    "stays behind": lambda: setattr(fork_server.ForkServer, "shut_down", lambda self: None),
    "samples wait": lambda: setattr(
        fork_server.ForkServer, "_idle", only_when_all_are(fork_server.ForkServer._idle)
    ),
    "errors score 0": lambda: setattr(score, "attempt", zero_for_errors(score.attempt)),
}


def zero_for_errors(attempt):
    def mutant(function, given):
        outcome = attempt(function, given)
        return outcome if isinstance(outcome, score.FunctionScore) else score.FunctionScore(0.0)

    return mutant


def only_when_all_are(idle):
    def mutant(self):
        found = idle(self)
        return found if len(found) == len(self.workers) else []

    return mutant


if __name__ == "__main__":
    MUTANTS[os.environ["MUTANT"]]()
    fork_server.main()
