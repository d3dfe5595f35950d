"""Ledger: the bytes that requests hold, by client, from the first of a body to the last of an answer.

Each request has an account: its body, the pictures in it, its results, and the unsent part of its answer.  A request
that does not fit is refused before it is made, or replaces a waiting one of a client that holds more.
"""

import threading
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType

SHARE = 0.75  # fraction of all bytes for one client, and for all except those that hold LITTLE
LITTLE = 1 / 16


class Full(Exception):
    """There is no room for a request now."""


class TooLarge(Exception):
    """A request needs more than the limit."""


class Account:
    """The bytes that a request holds, by kind.  It lasts as long as somebody is inside of `with account:`."""

    def __init__(self, ledger: "Ledger", client: str) -> None:
        self.client, self.parts = client, Counter[str]()
        self.drop: Callable[[Full], object] | None = None  # ends the request, if it may be ended for others
        self.is_spare = False  # nobody waits for what it holds: it goes first, for the client's own requests too
        self.is_closed = False
        self._ledger, self._users = ledger, 0

    def hold(self, what: str, count: int) -> None:
        """Hold so many bytes for something, instead of the earlier number.  Raises Full, TooLarge."""
        self._ledger.change(self, what, count - self.parts[what])

    def add(self, what: str, count: int) -> None:
        """Hold so many more bytes for something.  Raises Full, TooLarge."""
        self._ledger.change(self, what, count)

    def check(self, count: int) -> None:
        """Raises TooLarge if the request can never hold so many more bytes."""
        if self.parts.total() + count > self._ledger.share:
            needed, share = (round(size / 2**20) for size in (self.parts.total() + count, self._ledger.share))
            raise TooLarge(
                f"the request needs about {needed} MiB, expected at most {share} (`max_memory`): ask for less"
            )

    def __enter__(self) -> "Account":
        with self._ledger.lock:
            self._users += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._ledger.lock:
            self._users -= 1
            if not self._users:
                self._ledger.close(self)


class Ledger:
    """The accounts of all requests.  Any thread may use it."""

    def __init__(self, most: int) -> None:
        """most: bytes of all accounts."""
        self.most, self.share = most, int(SHARE * most)
        self.accounts: list[Account] = []  # the accounts that hold something, in the order in which they began to
        self.lock = threading.RLock()

    def held(self) -> Counter[str]:
        """The bytes that are held, by client."""
        held = Counter[str]()
        with self.lock:
            for account in self.accounts:
                held[account.client] += account.parts.total()
        return +held

    def change(self, account: Account, what: str, count: int) -> None:
        """Let an account hold so many more bytes, or less.  Raises Full, TooLarge."""
        with self.lock:
            if account.is_closed:
                raise Full("the request has ended")
            dropped = self._make_room(account, count) if count > 0 else []
            account.parts[what] += count
            if account not in self.accounts:
                self.accounts.append(account)
            ends = [rival.drop for rival in dropped if rival.drop is not None]
            for rival in dropped:
                self.close(rival)
        for end in ends:
            end(Full("a client that holds less needed the memory: try again later"))

    def close(self, account: Account) -> None:
        """End an account."""
        account.is_closed = True
        account.parts.clear()
        if account in self.accounts:
            self.accounts.remove(account)

    def _make_room(self, account: Account, count: int) -> list[Account]:
        """Return the accounts that have to end for an account to hold so many more bytes.  Raises Full, TooLarge."""
        account.check(count)
        held, dropped = self.held(), list[Account]()
        while True:
            mine = held[account.client] + count
            most = self.most if mine <= LITTLE * self.most else self.share
            if mine <= self.share and held.total() + count <= most:
                return dropped
            rivals = [rival for rival in self.accounts if rival.drop and rival not in dropped]
            spare = [
                rival for rival in rivals if rival.is_spare and (mine <= self.share or rival.client == account.client)
            ]
            if not spare and mine > self.share:
                raise Full(f"your other requests hold {held[account.client] >> 20} MiB: try again later")
            rivals = spare or [rival for rival in rivals if held[rival.client] > mine]
            if not rivals:
                raise Full("the server's memory for requests is full: try again later")
            greediest = max(held[rival.client] for rival in rivals)
            of_greediest = [rival for rival in rivals if held[rival.client] == greediest]
            dropped.append(of_greediest[0 if spare else -1])  # its oldest images, its newest request
            held[dropped[-1].client] -= dropped[-1].parts.total()


CLIENT: ContextVar[str] = ContextVar("client", default="")  # the client of the current request: clients take turns
ACCOUNT: ContextVar[Account | None] = ContextVar("account", default=None)  # of that request


def account() -> Account:
    """The account of the current request."""
    of_request = ACCOUNT.get()
    assert of_request is not None
    return of_request
