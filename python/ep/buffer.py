"""`EPBuffer`: memory that other ranks can reach, and the two operations on it."""

from __future__ import annotations

from typing import Any, NoReturn

from ep import _C, _lifetime, _registry
from ep._calls import arguments_of, collective
from ep._elastic import Elastic
from ep._facts import Facts
from ep.communicator import resolve_group
from ep.records import RoutingLayout, TensorSpec


class EPBuffer(Facts, Elastic):
    """Moves tokens between the ranks of a mixture-of-experts layer.

    Constructing is collective and checks that all ranks agree: `InvalidArgument` on every rank,
    naming the argument and both values, where they do not.  Every rank then makes the same calls in
    the same order, also with T = 0; any thread may call.

    Symbols: R ranks, T tokens of one rank in one call, H hidden, E experts, K top-k, L local
    experts, N rows received.

    Args:
        group: ProcessGroup of any backend, 1-D DeviceMesh, or `ep.Communicator`.  None: the default
            process group if torch.distributed is initialised, else one rank.  Only the group's
            store is used, never a collective of the group.
        num_experts: E, exact; at most 4096.
        num_topk, hidden, max_tokens_per_rank: maxima of K (at most 32), H and T; a call may use
            less. max_tokens_per_rank is equal on all ranks.
        token_bytes: most bytes of a dispatched row: x, scales and extras.  None: 4 * hidden + 64.
        output_bytes: most bytes of a combined row.  None: 4 * hidden.
        expert_offsets: R+1 ints, rank r owns [o[r], o[r+1]).  None: as evenly as can be, the first
            E % R ranks own one more.
        expert_slot: reserved.
        device: "auto" or "cpu"; CUDA devices raise `Unsupported` so far.
        num_sms: worker threads per operation; may differ by rank.  None: chosen from the cores.
        num_qps: queue pairs; CPUs have none and ignore it.
        ranks_per_node: declares the topology.  None: found out.
        num_regions: operations that may be in flight at once.
        max_latency_tokens: reserved for latency mode.
        outputs: where rows end up.  "window": views of the arena; "caller": copied, by the same
            operation, to memory of x's library; "auto": "window" while the largest free extent
            holds one dispatch of this shape at 1.5x balanced load.  A rank's own choice.
        arena_bytes: bytes for rows, equal on all ranks.  None: num_regions worst-case pairs:
            address space, committed when first written.
        timeout_s: bound of every wait in seconds.  None: the group's, else 600.
        elastic: reserved.

    Raises:
        InvalidArgument, CapacityError, Timeout, PeerLost, Unsupported.
    """

    _is_open = False
    _token: Any = None  # of the last call in a compiled graph; see ep._ops

    def __init__(
        self,
        group: Any = None,
        *,
        num_experts: int,
        num_topk: int,
        hidden: int,
        max_tokens_per_rank: int,
        token_bytes: int | None = None,
        output_bytes: int | None = None,
        expert_offsets: Any = None,
        expert_slot: Any = None,
        device: Any = "auto",
        num_sms: int | None = None,
        num_qps: int | None = None,
        ranks_per_node: int | None = None,
        num_regions: int = 2,
        max_latency_tokens: int = 128,
        outputs: str = "auto",
        arena_bytes: int | None = None,
        timeout_s: float | None = None,
        elastic: bool = False,
    ):
        options = locals()
        del options["self"], options["group"]
        communicator = resolve_group(group)
        self._communicator = communicator
        self._core = _C.Buffer(communicator._core, options)
        self._is_open = True
        _lifetime.open_buffers.add(self)
        communicator._buffers.add(self)
        self._name = _registry.add(
            self,
            f"rank {self.rank} of {self.num_ranks}, experts {self.expert_offsets}, "
            f"num_topk={num_topk}, hidden={hidden}, max_tokens_per_rank={max_tokens_per_rank}",
        )

    # --- the operations --------------------------------------------------------------------------

    @collective("x", "topk_idx", "topk_weights")
    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        scales: Any = None,
        quant: str | None = None,
        global_scale: Any = None,
        scale_layout: str | None = None,
        layout: str | None = None,
        expert_alignment: int | None = None,
        exact: bool | None = None,
        mode: str | None = None,
        max_tokens: int | None = None,
        max_rows: int | None = None,
        overflow: str | None = None,
        extras: Any = None,
        ids: str | None = None,
        outputs: str | None = None,
        handle: _C.Handle | None = None,
        out: Any = None,
        wait_for: Any = None,
        stream: Any = None,
        async_op: bool | None = None,
        num_sms: int | None = None,
        num_qps: int | None = None,
        split: bool | None = None,
    ) -> _C.DispatchOutput:
        """Sends each token to the ranks of its experts.  Collective.

        Tensors are of any library with DLPack, or numpy (uint16 as x: bit patterns of bf16).  None
        of an option is its default, in a replay the handle's value.

        Args:
            x: [T,H] bf16, fp16, fp32; any row stride, unit column stride; rows a multiple of 16
                bytes.  With scales, or of a quantised dtype (float8_e4m3fn, float8_e5m2, int8,
                uint8, float4_e2m1fn_x2): opaque bytes, forwarded untouched.
            topk_idx: [T,K] int32 or int64; -1 = no expert.  Duplicates count twice.
            topk_weights: [T,K] fp32 (bf16, fp16 are converted).
            scales: [T,S] of any 1-, 2- or 4-byte dtype, any strides.
            quant: a name of `ep.quant.formats()`; H is then a multiple of 128.
            scale_layout: "row"; others are reserved, as is global_scale.
            layout: "rank" (default): one row per (token, destination rank), by source rank, then
                token; "expert": one row per (token, slot), by expert, source, token, slot.
                "batched" is reserved.
            expert_alignment: layout "expert": each expert's rows start at a multiple; gap rows
                are 0.
            exact: True (default): exactly the received rows, the host learns the counts.  False:
                fixed sizes (see `max_rows`), counts in tensors, the host never waits.
            mode: "throughput"; "latency" is reserved.
            max_tokens: bound of T in this call, equal on all ranks.
            max_rows, overflow: N of a fixed-size output.  "raise" (default): too many rows are a
                CapacityError on every rank; "drop": rows past it contribute 0.
            extras: up to 8 more tensors [T,...] that travel along; contiguous rows.
            ids: "local" (default) or "global": what out.topk_idx holds.
            outputs: overrides the buffer's policy in this call.
            handle: replays that routing: no counting, no host wait.  x may have any dtype and H.
            out: a dict of arrays to write results into, by their names here (extras: a list); any
                subset, the others go where `outputs` says.  Each has the dtype and strides of
                `output_spec`, at least its rows, and starts at a multiple of 16 bytes; the result
                is the view of its first N rows.  A rank's own choice.
            wait_for: an event, or a list, that the operation starts behind.
            stream: `ep.Stream` to run on; None: ``comm_stream``.
            async_op: return when the counts are known (exact), or at once; wait for ``out.event``.
            num_sms, num_qps: for this call.
            split: reserved.

        Inputs that require grad, with grad mode on, raise InvalidArgument: use `ep.functional`.

        Raises:
            InvalidArgument, TypeError, CapacityError, Desync, Timeout, PeerError, PeerLost,
            Unsupported. The other ranks raise PeerError where the fault is one rank's own.
        """

    @collective("x", "handle")
    def combine(
        self,
        x: Any,
        handle: _C.Handle,
        *,
        weights: Any = None,
        row_weights: Any = None,
        bias: Any = None,
        partial: str | None = None,
        quant: str | None = None,
        out: Any = None,
        out_dtype: Any = None,
        ready: Any = None,
        wait_for: Any = None,
        stream: Any = None,
        async_op: bool | None = None,
        split: bool | None = None,
        num_sms: int | None = None,
        num_qps: int | None = None,
    ) -> _C.CombineOutput:
        """Brings the experts' rows home and adds them up.  Collective.

        Sums are fp32 in ascending slot order, without fma, and rounded once.  A token without a
        route gives its bias, else exact 0.

        Args:
            x: [N,H'] bf16, fp16, fp32: rows as dispatch laid them out; `expert_output` saves a
                copy.
            handle: of the dispatch.
            weights: [T,K] fp32 of this rank's own tokens, layout "expert" only: rows are multiplied
                by them.
            row_weights: fp32 [N,K] ("rank") or [N] ("expert"): travel home unmultiplied.
            bias: up to two [T,H'], added in fp32 in this order.
            partial: "same" or "fp32": dtype of a node's partial sum on the network; one node has
                none.
            quant, ready, split: reserved.
            out: [T,H'] to write into.
            out_dtype: bf16, fp16 or fp32.  None: x's.
            wait_for, stream, async_op, num_sms, num_qps: as for dispatch.

        Returns:
            x [T,H'], topk_weights [T,K] (None without row_weights), status [1], event.

        Raises:
            As dispatch.
        """

    def expert_output(
        self, handle: _C.Handle, hidden: int | None = None, dtype: Any = "bfloat16"
    ) -> Any:
        """A window-backed [N,hidden] to compute into, so that combine copies nothing.

        `handle` is of the dispatch, `hidden` (None: the buffer's) may differ, `dtype` is bf16, fp16
        or fp32.  Consumed by combine: do not touch it afterwards.  Waits for the calls before it.
        Raises CapacityError when no free extent holds it, InvalidArgument for another's handle.
        """
        return self._core.expert_output(handle, hidden, dtype)

    def output_spec(
        self, x: Any, topk_idx: Any = None, topk_weights: Any = None, **options: Any
    ) -> dict[str, Any]:
        """What `dispatch` would make of these arguments, without sending: {name: TensorSpec}.

        x [T,H], topk_idx [T,K], topk_weights [T,K] and options as of `dispatch`; arithmetic only,
        on this rank alone.  N of an exact dispatch that is no replay is its bound.  Names of
        results that such a dispatch does not have are missing; extras is a list.  Raises TypeError,
        InvalidArgument and CapacityError as `dispatch` would.
        """
        options |= {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
        spec = self._core.output_spec(options)
        extras = [TensorSpec(*extra) for extra in spec.pop("extras", [])]
        return {name: TensorSpec(*tensor) for name, tensor in spec.items()} | (
            {"extras": extras} if extras else {}
        )

    def routing_layout(self, topk_idx: Any) -> RoutingLayout:
        """Counts of a routing, topk_idx [T,K] int32 or int64, on this rank alone.

        Raises InvalidArgument for ids outside [-1, E).
        """
        return RoutingLayout(*self._core.routing_layout(topk_idx))

    def warm(self, **arguments: Any) -> None:
        """Collective: prepares all that calls with these arguments of dispatch or combine need.

        CPUs have nothing to compile, and ranks are connected since construction: names are checked,
        and reserved values raise Unsupported.
        """
        from ep.support import require

        known = arguments_of(EPBuffer.dispatch, EPBuffer.combine)
        for name in arguments:
            if name not in known:
                raise TypeError(f"warm() got {name!r}, no argument of dispatch or combine")
        require(self.device, arguments)

    # --- faults and the end -----------------------------------------------------------------------

    def check(self) -> None:
        """Raises a deferred fault (exact=False, async) without waiting; each raises once."""
        self._core.check()

    def abort(self, reason: str) -> None:
        """Ends all ranks' current or next call: PeerError with the reason.  Not collective."""
        self._core.abort(str.encode(reason, errors="replace"))  # it may quote a file name

    def resync(self) -> int:
        """Collective, required after Timeout or PeerLost: drops what is in flight.

        Returns the number of the last call that completed on all ranks.  Older handles stay valid.
        Raises Timeout or PeerLost when a rank does not come.
        """
        return self._core.resync()

    def close(self) -> None:
        """Ends this rank's part; waits, bounded, for peers that still read its window.  Idempotent.

        Tensors that view the window stay valid: the memory is unmapped when the last of them dies.
        """
        self._is_open = False
        _lifetime.open_buffers.discard(self)
        self._core.close()

    def __enter__(self) -> EPBuffer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._is_open:
            _lifetime.warn_unclosed(self)
            self.close()

    def __repr__(self) -> str:
        state = "" if self._is_open else ", closed"
        return f"<EPBuffer rank {self.rank} of {self.num_ranks} on {self.device}{state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an EPBuffer belongs to its process: make one on each rank")
