"""Problems with exact answers, as text: what the accuracy model is trained and scored on.

A document is a table of keys with values, followed by problems that are solved one after another:

    Q4821;C0937;...                   ten keys, four digits each
    ?C0937;                           recall: the value of a key of the table
    347+582=9290;                     addition of three digits, the sum's four digits from the lowest up
    >hkqwzt=hkqwzt;                   copying of five to nine letters, all different
    <hkqwzt=tzwqkh;                   the same backwards

An answer is what follows "=", or the key in "?C", up to its ";", which counts. Sums with ``is_held_out`` never occur in training;
what is copied or recalled is drawn afresh everywhere. One token a byte. numpy's generators give the same documents on every
machine.
"""

import dataclasses

import numpy as np

TASKS = ("recall", "addition", "copy", "reverse")
VOCAB_SIZE = 128
STOP = ord(";")

_KEYS, _DIGITS = 10, 4
_MIN_LETTERS, _MAX_LETTERS = 5, 9
_TABLE = _KEYS * (_DIGITS + 2)
_WIDTH = 2 * _MAX_LETTERS + 3
_SHORTEST = _DIGITS + 3


@dataclasses.dataclass(frozen=True)
class Documents:
    """N documents of T tokens, and where their P problems stand.

    Attributes:
        tokens: uint8 [N, T], filled up with ";".
        tasks: int [N, P], index into TASKS.
        starts, answers, stops: int [N, P], the first token of a problem, of its answer, and the one after it; may lie beyond T.
    """

    tokens: np.ndarray
    tasks: np.ndarray
    starts: np.ndarray
    answers: np.ndarray
    stops: np.ndarray

    def answer_mask(self) -> np.ndarray:
        """bool [N, T], the tokens of answers."""
        place = np.arange(self.tokens.shape[1])
        edges = np.zeros((len(self.tokens), self.tokens.shape[1] + 1), np.int32)
        rows = np.arange(len(self.tokens))[:, None]
        np.add.at(edges, (rows, np.minimum(self.answers, place.size)), 1)
        np.add.at(edges, (rows, np.minimum(self.stops, place.size)), -1)
        return np.cumsum(edges, axis=1)[:, :-1] > 0

    def solved(self, correct: np.ndarray) -> dict[str, float]:
        """Share of the complete problems of each task whose answer's tokens are all in ``correct``, bool [N, T]; NaN of none."""
        T = self.tokens.shape[1]
        wrong = np.pad(np.cumsum(~correct, axis=1), ((0, 0), (1, 0)))
        first, last = np.minimum(self.answers, T), np.minimum(self.stops, T)
        is_solved = np.take_along_axis(wrong, last, 1) == np.take_along_axis(wrong, first, 1)
        shares = {}
        for i, name in enumerate(TASKS):
            counts = (self.stops <= T) & (self.tasks == i)
            shares[name] = float(is_solved[counts].mean()) if counts.any() else float("nan")
        return shares


def is_held_out(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether a + b is one of the sums kept for scoring, about a tenth of the million."""
    return (31 * a + 17 * b) % 101 < 10


def make_documents(rng: np.random.Generator, count: int, length: int, *, held_out: bool) -> Documents:
    """``count`` documents of ``length`` tokens; sums are held-out ones, or others."""
    num_problems = -(-(length - _TABLE) // _SHORTEST)
    keys = rng.random((count, 26)).argsort(axis=1)[:, :_KEYS] + ord("A")
    values = rng.integers(0, 10, (count, _KEYS, _DIGITS)) + ord("0")
    shape = (count, num_problems)
    tasks = rng.integers(0, len(TASKS), shape)
    flat = np.zeros((count * num_problems, _WIDTH), np.uint8)
    answers, sizes = np.zeros(len(flat), int), np.zeros(len(flat), int)
    for i, write in enumerate((_recall(keys, values), _addition(held_out), _copy(">", 1), _copy("<", -1))):
        at = np.flatnonzero(tasks.reshape(-1) == i)
        flat[at], answers[at], sizes[at] = write(rng, at // num_problems)
    ends = _TABLE + np.cumsum(sizes.reshape(shape), axis=1)
    starts = ends - sizes.reshape(shape)
    tokens = np.full((count, length + _WIDTH), STOP, np.uint8)
    table = np.full((count, _KEYS, _DIGITS + 2), STOP, np.uint8)
    table[..., 0], table[..., 1:-1] = keys, values
    tokens[:, :_TABLE] = table.reshape(count, -1)
    doc, column = np.arange(count)[:, None, None], np.arange(_WIDTH)
    targets = np.where(column < sizes.reshape(*shape, 1), starts[..., None] + column, tokens.shape[1])
    kept = targets < tokens.shape[1]
    tokens[np.broadcast_to(doc, targets.shape)[kept], targets[kept]] = flat.reshape(*shape, _WIDTH)[kept]
    return Documents(tokens[:, :length], tasks, starts, starts + answers.reshape(shape), ends)


def make_problems(seed: int, count: int, length: int) -> list[tuple[str, list[int], list[int]]]:
    """``count`` held-out problems, the tasks in turn: task, prompt ids, answer ids.

    A prompt is a document up to the answer of a problem near its end, answers of the problems before included; it has at most
    ``length`` tokens and, with room for it, at least 60 % of them.
    """
    rng = np.random.default_rng(seed)
    problems: list[tuple[str, list[int], list[int]]] = []
    while len(problems) < count:
        documents = make_documents(rng, count, length, held_out=True)
        for i in range(count):
            task = len(problems) % len(TASKS)
            fits = (documents.tasks[i] == task) & (documents.stops[i] <= length) & (documents.starts[i] >= 0.6 * length)
            if len(problems) < count and fits.any():
                last = np.flatnonzero(fits)[-1]
                text = documents.tokens[i].tolist()
                begin, end = documents.answers[i, last], documents.stops[i, last]
                problems.append((TASKS[task], text[:begin], text[begin:end]))
    return problems


def _recall(keys: np.ndarray, values: np.ndarray):
    def write(rng: np.random.Generator, document: np.ndarray):
        entry = rng.integers(0, _KEYS, len(document))
        text = np.full((len(document), _WIDTH), STOP, np.uint8)
        text[:, 0], text[:, 1] = ord("?"), keys[document, entry]
        text[:, 2 : 2 + _DIGITS] = values[document, entry]
        return text, 2, 3 + _DIGITS

    return write


def _addition(held_out: bool):
    def write(rng: np.random.Generator, document: np.ndarray):
        a, b = rng.integers(0, 1000, (2, len(document)))
        while (wrong := is_held_out(a, b) != held_out).any():
            b[wrong] = rng.integers(0, 1000, wrong.sum())
        text = np.full((len(document), _WIDTH), STOP, np.uint8)
        for i, power in enumerate((100, 10, 1)):
            text[:, i], text[:, 4 + i] = a // power % 10 + ord("0"), b // power % 10 + ord("0")
        text[:, 3], text[:, 7] = ord("+"), ord("=")
        for i in range(4):
            text[:, 8 + i] = (a + b) // 10**i % 10 + ord("0")
        return text, 8, 13

    return write


def _copy(sign: str, step: int):
    def write(rng: np.random.Generator, document: np.ndarray):
        letters = rng.random((len(document), 26)).argsort(axis=1)[:, :_MAX_LETTERS] + ord("a")
        size = rng.integers(_MIN_LETTERS, _MAX_LETTERS + 1, len(document))
        text = np.full((len(document), _WIDTH), STOP, np.uint8)
        text[:, 0] = ord(sign)
        for n in range(_MIN_LETTERS, _MAX_LETTERS + 1):
            rows = np.flatnonzero(size == n)
            text[rows, 1 : n + 1] = letters[rows, :n]
            text[rows, n + 1] = ord("=")
            text[rows, n + 2 : 2 * n + 2] = letters[rows, :n][:, ::step]
        return text, size + 2, 2 * size + 3

    return write
