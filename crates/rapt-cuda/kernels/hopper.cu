// Attention on the tensor cores of compute capability 9.0 by wgmma, for many queries.
//
//   A block stays on its multiprocessor and works off items: up to BLOCK_M queries of a task, all keys that they see.
//   producer (4 warps)         Q of the item, then K and V in tiles of BLOCK_N keys from key 0, through a ring of STAGES (load.cuh);
//                              the others load the mask, some tiles ahead (mask_ring.cuh): tiles that it hides are not loaded
//   consumers (WGS x 4 warps)  64 queries each, per item:
//
//     s = q @ K[0].T
//     p = exponentiate(apply_scores(s))
//     for n = 1 ..
//         s = q @ K[n].T                        under way
//         acc_o += p @ V[n-1]                   under way, behind it
//         p = exponentiate(apply_scores(s))     while acc_o is still under way, and the other group's products run
//         rescale acc_o if a reference moved
//     acc_o += p @ V[last]                      under way: rows, factors and lse of this item, place of the next
//     s = q @ K[0].T                            of the next item under way: acc_o is stored (CHAINED)
//
// Q and the keys are read by the tensor cores from shared memory, p from registers: its accumulator layout is the operand's.
// What TMA cannot read (it takes addresses and strides of 16 bytes, inner stride 1) the producer loads element by element into the
// same tiles: products, order and bits are the same.
//
// An item with a sum that is not finite, or that cannot be computed so, is noted, and gets a careful pass at the end (careful.cuh).
// Deliberately absent: what rows are compared with (hopper/softmax.cuh), splitting of the keys (decode.cu), float32 (hopper_f32.cu).

#include "hopper/careful.cuh"
#include "hopper/consumer.cuh"
#include "hopper/load.cuh"

__device__ inline void Consumer::run() {
    const Params& p = h.p;
    const float c = NATURAL_UNITS ? LOG2_E : exponent_factor(p);
    Accumulator<NT> s;
    int round = next_round(0, false);
    Work next = CHAINED ? work_of(round) : Work();
    bool begun = false;  // whether s has the next item's first scores
#pragma unroll 1
    while (round >= 0) {
        const Work work = CHAINED ? next.as_uniform() : work_of(round);
        if (!work.any || !work.has_rows(p)) {
            if (work.any) {
                skip_item(work);
            } else {
                store_nothing(p, place(work));
            }
            round = next_round(round + 1, false);
            if (CHAINED) next = work_of(round);
            continue;
        }
        if (!begun) {
            await_queries(work);
            multiply_keys(s, done);
            wgmma_wait<0>(s);
        }
        release(sh.k_empty[stage_of(done)]);
        OperandA<NT / 2> p_rounded;
        MaskRows mask;
        int n0 = work.n0, n1 = n0 + BN;
        reset_rows();
        poll_barriers(done);
        load_mask(mask);
        release_mask();
        bool more = skip_hidden_tiles(n1, work.end);
        float factor[2], sum[2];
        apply_scores<false>(s, work, n0, mask, factor, c);
        exponentiate<false>(s, mask, sum, c, done);
        pack_weights(p_rounded, s);
        if (!more) release_queries();
#pragma unroll 1
        for (; more; done++) {
            load_mask(mask);
            await(sh.k_full[stage_of(done + 1)], phase_of(done + 1), keys_ready);
            take_turn();
            multiply_keys(s, done + 1);
            await(sh.v_full[stage_of(done)], phase_of(done), values_ready);
            add_values(p_rounded, done, n0 != work.n0);
            end_turn();
            release_mask();
            n0 = n1, n1 += BN;
            more = skip_hidden_tiles(n1, work.end);
            wgmma_wait<1>(s);
            release(sh.k_empty[stage_of(done + 1)]);
            mbarrier_arrive_if(sh.q_empty[q_stage()], is_first() & !more & queries_by_tma(p));
            const bool moved = apply_scores<false>(s, work, n0, mask, factor, c);
            if (MASKS_LATE && mask.kind == MIXED) {
                exponentiate<true>(s, mask, sum, c, done + 1);
            } else {
                exponentiate<false>(s, mask, sum, c, done + 1);
            }
            // The branch before the wait holds the exponentials there; without it the compiler puts them behind.
            if (moved | may_raise(sum)) {
                wgmma_wait<0>(acc_o);
                raise_reference<false>(s, factor, moved, sum);
            } else {
                wgmma_wait<0>(acc_o);
            }
            release_values(done, more ? -1 : 0);
            pack_weights(p_rounded, s);
        }
        mbarrier_wait(sh.v_full[stage_of(done)], phase_of(done));
        add_values(p_rounded, done, n0 != work.n0);
        Ends ends;
        if (CHAINED) {
            ends = finish<false>(work);
            round = next_round(round + 1, false);
            next = work_of(round), begun = next.any && next.has_rows(p);
        }
        wgmma_wait<0>(acc_o);
        const bool through_v = OUT_THROUGH_V && n0 != work.n0;
        release_values(done++, through_v ? 1 : -1);
        const int buffer = OUT_THROUGH_V ? stage_of(done - 2 + group()) : 0;  // through which sums are stored
        if (CHAINED) {
            if (begun) await_queries(next);
            // Of whatever lies there if nothing is begun, and unused then: products under a condition are made one by one
            // (C7515).
            multiply_keys(s, done);
        } else {
            ends = finish<false>(work);
        }
        store_or_note(work, ends, buffer, through_v);
        if (CHAINED) {
            wgmma_wait<0>(s);
        } else {
            round = next_round(round + 1, false);
        }
    }
}

// By one thread: barriers, with as many arrivals as each has.
__device__ inline void init_barriers(Shared& sh, bool mask_by_tma) {
    for (int stage = 0; stage < Q_STAGES; stage++) mbarrier_init(sh.q_full[stage], 1), mbarrier_init(sh.q_empty[stage], WGS * 4);
    for (int stage = 0; stage < STAGES; stage++) {
        mbarrier_init(sh.k_full[stage], VECTOR ? 1 : 128), mbarrier_init(sh.v_full[stage], VECTOR ? 1 : 128);
        mbarrier_init(sh.k_empty[stage], WGS * 4), mbarrier_init(sh.v_empty[stage], WGS * 4);
    }
#if MASK != NO_MASK
    for (int stage = 0; stage < MASK_STAGES; stage++) {
        mbarrier_init(sh.mask.loaded[stage], 1), mbarrier_init(sh.mask.taken[stage], SCANNERS);
        mbarrier_init(sh.mask.full[stage], mask_by_tma ? SCANNERS : READERS);
        mbarrier_init(sh.mask.empty[stage], CONSUMERS + (VECTOR ? 1 : 128));
        sh.mask.kinds[stage] = 0;
    }
#endif
    fence_mbarrier_init();
}

// The warps that load: the items of this block, then those that are noted for a careful pass. One thread requests Q, K and V; where a
// mask comes by TMA one requests it and two warps scan it, else three warps load it. Without TMA all threads load K and V.
__device__ inline void run_producer(const HopperParams& h, Shared& sh, bool mask_by_tma) {
    const int lane = threadIdx.x - CONSUMERS;
    Producer producer{h, sh};
#if MASK != NO_MASK
    const int reading = VECTOR ? lane - (128 - READERS) : lane;
    const bool reads = reading >= 0 && reading < READERS;
    MaskReader reader{h.p, sh.mask, h.mask_access != KEY_BY_KEY, reading};
#endif
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
#if VARLEN
        // What an item is comes out of memory: that is asked an item ahead.
        Item next(h, 0);
#endif
#pragma unroll 1
        for (int round = 0;; round++) {
#if VARLEN
            const Item item = next;
            if (item.is_beyond(h)) break;
            bool is_asked = false;
            const auto ask = [&] {
                if (!is_asked) next = Item(h, round + 1);
                is_asked = true;
            };
#else
            const Item item(h, round);
            if (item.is_beyond(h)) break;
#endif
            if (item.is_none() || (pass == 1 && !is_careful_round(sh, round))) {
#if VARLEN
                ask();
#endif
                continue;
            }
            const Task task(h.p, item.task);
            const int r0 = item.r0(h);
            const Tiles tiles = item.tiles(h);
#if VARLEN
            // Behind the first tile of this one.
            if (loads_keys(lane)) {
                producer.run(task, r0, tiles, [&](int n0) {
                    if (n0 != tiles.first) ask();
                });
            }
            ask();
#elif MASK == NO_MASK
            if (loads_keys(lane)) producer.run(task, r0, tiles, [](int) {});
#else
            const int end = tiles.first + tiles.count * BN;
            if (reads && !mask_by_tma) reader.begin(task, r0, tiles.first, end);
            if (!VECTOR) {
                producer.run(task, r0, tiles, [&](int n0) {
                    if (reads) reader.step(task, r0, n0, end);
                });
            } else if (mask_by_tma && reading == 0) {
                reader.load_by_tma(h.mask_map, task, r0, tiles.first, end);
            } else if (mask_by_tma && reading >= READERS - SCANNERS) {
#pragma unroll 1
                for (int n0 = tiles.first; n0 < end; n0 += BN) reader.publish_loaded(r0, n0);
            } else if (reads && !mask_by_tma) {
#pragma unroll 1
                for (int n0 = tiles.first; n0 < end; n0 += BN) reader.step(task, r0, n0, end);
            } else if (loads_keys(lane)) {
                producer.run(task, r0, tiles, [](int) {});
            }
#endif
        }
        __syncwarp();
        bar_sync(END, THREADS);
        if (!any_careful_round(sh)) break;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ HopperParams h) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& sh = *(Shared*)memory;
    const int group = uniform(threadIdx.x / 128);
#if MASK != NO_MASK
    const bool mask_by_tma = VECTOR && h.mask_access == BY_TMA;
#else
    const bool mask_by_tma = false;
#endif
    if (threadIdx.x == 0) init_barriers(sh, mask_by_tma);
#if VARLEN
    // The launch before this one says what there is to do.
    griddepcontrol_wait();
#endif
    for (int at = threadIdx.x; at < CAREFUL_BITS / 32; at += THREADS) sh.careful_rounds[at] = 0;
    __syncthreads();

    if (group == WGS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        run_producer(h, sh, mask_by_tma);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer consumer{h, sh, group};
        if (group == WGS - 1) bar_arrive(TURN, 256);
        consumer.run();
        bar_sync(END, THREADS);
        if (any_careful_round(sh)) {
            consumer.run_careful();
            bar_sync(END, THREADS);
        }
        if (STAGED && threadIdx.x % 32 == 0) tma_store_wait();
    }
}
