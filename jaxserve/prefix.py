"""Prefix reuse: sequences that begin alike share the pages of what they have in common.

Every full page of known tokens has a label, a digest of all tokens up to its end. Once a page has
been computed it can be found by its label, by sequences that run now and by later ones. Of
sequences that begin alike and run together the first one *claims* the labels of its prompt; the
others wait for its pages instead of computing copies. So a prefix exists once, however many
requests carry it, and even if they all come at the same moment.

The last page of a prompt is labelled too, full or not: a sequence with the very same prompt
(another of n samples) copies that page on the device and computes one token. Copying is needed
because it goes on writing there; the tokens already in the page stay valid for everybody else.

A sequence that finds everything still computes its last token: that is where its logits are.
"""

from __future__ import annotations

import hashlib

from jaxserve.pages import PagePool, page_digests, root_digest
from jaxserve.sequence import Sequence


class PrefixReuse:
    """Labels, claims and finds pages. Part of the scheduler, and like it changes sequences."""

    def __init__(self, pool: PagePool, *, enabled: bool = True) -> None:
        self._pool = pool
        self._enabled = enabled
        self._claims: dict[bytes, Sequence] = {}

    def prepare(self, sequence: Sequence) -> None:
        """Label the prompt of a new sequence."""
        if not self._shares(sequence):
            return
        self._extend_labels(sequence)
        full = (sequence.num_prompt - 1) // self._pool.page_size
        parent = self._parent_label(sequence, full)
        tail = sequence.tokens[full * self._pool.page_size :]
        sequence.tail_label = hashlib.sha256(parent + tail.tobytes()).digest()

    def _shares(self, sequence: Sequence) -> bool:
        """Whether the sequence has a part in this. One that wants to know how likely its prompt is,
        or the mean of its hidden states, computes all of it."""
        sampling = sequence.request.sampling
        return self._enabled and sampling.prompt_logprobs is None and sampling.pooling != "mean"

    def missing(self, sequence: Sequence) -> int:
        """Free pages that the sequence's known tokens will take, neither shared nor promised."""
        held = len(sequence.pages)
        needed = self._pool.pages_for(sequence.num_known) - held
        if sequence.num_pending > 1:
            for label in sequence.labels[held : self._num_findable(sequence)]:
                page = self._pool.find(label)
                if page is None and self._claims.get(label, sequence) is sequence:
                    break  # a gap: whatever lies behind it cannot be taken over
                needed -= page is None or not self._pool.is_cached(page)
        return needed

    def uncached(self, sequence: Sequence) -> int:
        """Tokens of a new sequence that are not computed yet, nor being computed for another."""
        found = 0
        for label in sequence.labels[: self._num_findable(sequence)]:
            if self._pool.find(label) is None and label not in self._claims:
                break
            found += 1
        return sequence.num_pending - found * self._pool.page_size

    def advance(self, sequence: Sequence) -> bool:
        """Take over every page that has been computed by now.

        Returns:
            Whether the sequence should compute on. False: another one is computing its next page.
        """
        page_size = self._pool.page_size
        if not self._shares(sequence) or sequence.num_computed != len(sequence.pages) * page_size:
            return True
        stop = self._num_findable(sequence)
        for page in self._pool.find_run(sequence.labels[len(sequence.pages) : stop]):
            self._pool.hold(sequence.pages, page)
            self._found(sequence, sequence.num_computed + page_size)
        return self._claim(sequence)

    def copy_tail(self, sequence: Sequence) -> tuple[int, int] | None:
        """Copy the last page of the same prompt, if it exists and a page is free.

        Returns:
            (from, to) for the device. All but the sequence's last token is computed then.
        """
        pool = self._pool
        at_tail = sequence.num_computed == len(sequence.pages) * pool.page_size
        if not at_tail or sequence.num_drawn or not 1 < sequence.num_pending <= pool.page_size:
            return None
        source = pool.find(sequence.tail_label)
        if source is None or not pool.grow(sequence.pages, sequence.num_known):
            return None
        self._found(sequence, sequence.num_known - 1)
        return source, sequence.pages[-1]

    def landed(self, sequence: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a running sequence are computed: let them be found."""
        num_full = num_tokens // self._pool.page_size
        ends_prompt = num_tokens == sequence.num_prompt
        # Most tokens of most sequences fill no page.
        if not (num_full > sequence.num_labelled or ends_prompt) or not self._shares(sequence):
            return
        if num_full > sequence.num_labelled:
            self._extend_labels(sequence)
            for index in range(sequence.num_labelled, num_full):
                self._publish(sequence, index, sequence.labels[index])
            sequence.num_labelled = num_full
        if ends_prompt:
            last = self._pool.pages_for(num_tokens) - 1
            self._publish(sequence, last, sequence.tail_label)

    def drop(self, sequence: Sequence) -> None:
        """The sequence computes nothing any more: whoever waits for it must do so itself."""
        if sequence.claims:
            for label in (*sequence.labels, sequence.tail_label):
                if self._claims.get(label) is sequence:
                    del self._claims[label]
        sequence.claims = False
        sequence.num_labelled = 0

    def _found(self, sequence: Sequence, num_computed: int) -> None:
        if not sequence.num_preemptions:  # what it computed itself and found again is no news
            sequence.num_cached += num_computed - sequence.num_computed
        sequence.num_computed = num_computed

    def _publish(self, sequence: Sequence, index: int, label: bytes) -> None:
        self._pool.label(sequence.pages[index], label)
        if self._claims.get(label) is sequence:
            del self._claims[label]

    def _claim(self, sequence: Sequence) -> bool:
        """Whether the next page is the sequence's own to compute."""
        if sequence.num_drawn:
            return True  # it is being recomputed: nobody waits for it
        index = len(sequence.pages)
        label = sequence.labels[index] if index < self._num_findable(sequence) else None
        owner = self._claims.get(label or sequence.tail_label)
        if owner is not None and owner is not sequence:
            return False
        if not sequence.claims:
            sequence.claims = True
            for own in (*sequence.labels[index:], sequence.tail_label):
                self._claims.setdefault(own, sequence)
        return True

    def _num_findable(self, sequence: Sequence) -> int:
        """Pages that can be taken over whole: the last known token is always computed."""
        return min(len(sequence.labels), (sequence.num_known - 1) // self._pool.page_size)

    def _extend_labels(self, sequence: Sequence) -> None:
        labels, page_size = sequence.labels, self._pool.page_size
        if len(sequence.tokens) // page_size > len(labels):
            parent = self._parent_label(sequence, len(labels))
            labels += list(
                page_digests(sequence.tokens, page_size, start=len(labels), parent=parent)
            )

    def _parent_label(self, sequence: Sequence, index: int) -> bytes:
        """The label of the page before `index`."""
        return sequence.labels[index - 1] if index else root_digest(sequence.request.cache_salt)
