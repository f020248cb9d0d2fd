// Runs a kernel in Metal's language on this processor, workgroup by workgroup, and judges each access.
//
//   for each workgroup
//     until all threads have ended: each thread in turn, on a stack of its own, up to the next barrier
//       threads of a simdgroup by way of what they do together: there all of them are at one call
//     there all are at one barrier, or all have ended
//
// What a simdgroup does together (products of matrices, an exchange of numbers) orders no access to memory.
//
// The text is compiled with -fsanitize=thread, for the calls that this puts before each access to memory; what they call stands here, and not in a
// library. An access is
//   to the thread's own stack;
//   to a buffer that is bound: inside of it, at a multiple of its size, read if it is an input, written once if it is an output;
//   to workgroup memory: inside an array, to what was written in this workgroup, and not to what another thread writes (or, if this is a write,
//   reads) between the same barriers. Atomic stores may meet; an atomic load and a store of another thread may not, since the result would be a matter
//   of luck.
// The first that is not ends the launch, before it happens. Deliberately absent: threads of the system, and caches.

#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>

namespace {

enum Rights : uint32_t { READ = 1, WRITE = 2 };

// Bytes that are bound.
struct Range {
    const char* name;
    uintptr_t begin;
    uint64_t bytes;
    uint32_t rights;
};

struct Launch {
    void* const* slots;
    const Range* ranges;
    uint32_t num_ranges;
    uint32_t threads;
    uint32_t groups[2];
    char* message;
    uint64_t message_bytes;
};

constexpr uint32_t MOST_THREADS = 1024, MOST_SPACES = 16, MOST_SPACE_BYTES = 32 << 10, MOST_RANGES = 16;
constexpr size_t STACK_BYTES = 128 << 10;
constexpr uint16_t SEVERAL = 0xffff;
// Accesses of one launch; more is a loop without end.
constexpr uint64_t MOST_ACCESSES = 4'000'000'000;
// Threads of a simdgroup, and bytes that each of them gives to the others at a time.
constexpr uint32_t LANES = 32, MOST_GIVEN = 16;
// Bytes of workgroup memory of which the last accesses are known; elements are no smaller.
#ifndef RAPT_CELL_BYTES
#define RAPT_CELL_BYTES 4
#endif
constexpr uint32_t CELL_BYTES = RAPT_CELL_BYTES;

struct Thread {
    jmp_buf context;
    ucontext_t first;
    uint8_t* stack;
    bool is_made, has_ended;
    int barrier;
    // The call that it waits in for the others of its simdgroup, and how many there were.
    const void* together;
    uint32_t calls;
};

// What is known of a cell of workgroup memory: the last writer and reader, and between which barriers that was.
struct Cell {
    uint32_t write_epoch, read_epoch;
    uint16_t writer, reader;
    bool is_atomic;
};

struct Space {
    const char* name;
    uintptr_t begin;
    uint64_t bytes;
    Cell cells[MOST_SPACE_BYTES / CELL_BYTES];
};

Thread threads[MOST_THREADS];
Space spaces[MOST_SPACES];
uint32_t num_spaces;
const Launch* launch;
uint8_t* written[MOST_RANGES];
// What threads give to the others of their simdgroup, of this call and of the one before: whoever is a call ahead overwrites nothing that is read.
struct Given {
    alignas(16) uint8_t bytes[MOST_GIVEN];
};
Given given[2][MOST_THREADS];
jmp_buf scheduler;
uint32_t me, group[2], epoch, first_epoch;
uint64_t accesses;
bool has_failed;

[[noreturn]] void fail(const char* what, const char* name, int64_t byte, uint64_t bytes) {
    snprintf(launch->message, launch->message_bytes, "%s: %s, byte %lld of %llu; thread %u of workgroup (%u, %u), behind the barrier of line %d", what,
             name, (long long)byte, (unsigned long long)bytes, me, group[0], group[1], threads[me].barrier);
    has_failed = true;
    _longjmp(scheduler, 1);
}

void in_space(Space& space, uintptr_t at, uint32_t size, bool is_write, bool is_atomic) {
    const uint64_t from = at - space.begin;
    auto refuse = [&](const char* what) { fail(what, space.name, int64_t(from), space.bytes); };
    if (from + size > space.bytes) refuse(is_write ? "a write past workgroup memory" : "a read past workgroup memory");
    for (uint64_t n = from / CELL_BYTES; n < (from + size + CELL_BYTES - 1) / CELL_BYTES; n++) {
        Cell& cell = space.cells[n];
        const bool is_written_by_others = cell.write_epoch == epoch && cell.writer != me;
        const bool is_read_by_others = cell.read_epoch == epoch && cell.reader != me;
        if (is_write) {
            if (is_written_by_others && !(is_atomic && cell.is_atomic)) refuse("a write of what another thread writes meanwhile");
            if (is_read_by_others) refuse("a write of what another thread reads meanwhile");
            cell.writer = is_written_by_others ? SEVERAL : uint16_t(me);
            cell.write_epoch = epoch;
            cell.is_atomic = is_atomic;
        } else {
            if (cell.write_epoch < first_epoch) refuse("a read of workgroup memory that was not written");
            if (is_written_by_others) refuse("a read of what another thread writes meanwhile");
            cell.reader = is_read_by_others ? SEVERAL : uint16_t(me);
            cell.read_epoch = epoch;
        }
    }
}

void in_range(uint32_t n, uintptr_t at, uint32_t size, bool is_write) {
    const Range& range = launch->ranges[n];
    const uint64_t from = at - range.begin;
    auto refuse = [&](const char* what) { fail(what, range.name, int64_t(from), range.bytes); };
    if (from + size > range.bytes) refuse(is_write ? "a write past a buffer" : "a read past a buffer");
    if (!(range.rights & (is_write ? WRITE : READ))) refuse(is_write ? "a write of an input" : "a read of an output");
    if (is_write) {
        for (uint64_t byte = from; byte < from + size; byte++) {
            if (written[n][byte]++) refuse("a second write of an output");
        }
    }
}

// `alignment`: of the address; that of a packed type is its element's.
void access(const void* address, uint32_t size, bool is_write, bool is_atomic = false, uint32_t alignment = 0) {
    if (alignment == 0) alignment = size;
    const auto at = reinterpret_cast<uintptr_t>(address);
    const auto stack = reinterpret_cast<uintptr_t>(threads[me].stack);
    if (at - stack < STACK_BYTES) return;
    if (++accesses > MOST_ACCESSES) fail("a launch without end", "all", 0, 0);
    for (uint32_t n = 0; n < num_spaces; n++) {
        // What is a little past an array is meant for it: they lie far from each other.
        if (at - spaces[n].begin < MOST_SPACE_BYTES) {
            if (at % alignment) fail("an address between elements", spaces[n].name, int64_t(at - spaces[n].begin), spaces[n].bytes);
            return in_space(spaces[n], at, size, is_write, is_atomic);
        }
    }
    int64_t nearest = INT64_MAX;
    const char* name = "nothing";
    for (uint32_t n = 0; n < launch->num_ranges; n++) {
        const Range& range = launch->ranges[n];
        const int64_t from = int64_t(at - range.begin);
        if (at - range.begin < range.bytes) {
            if (at % alignment) fail("an address between elements", range.name, from, range.bytes);
            return in_range(n, at, size, is_write);
        }
        if (range.bytes && llabs(from) < llabs(nearest)) {
            nearest = from;
            name = range.name;
        }
    }
    fail(is_write ? "a write outside of all buffers, nearest to" : "a read outside of all buffers, nearest to", name, nearest, 0);
}

}  // namespace

// The text's.
extern "C" void rapt_kernel(void* const* slots, const uint32_t* group, const uint32_t* groups, uint32_t thread);

// The row of a thread's elements of a matrix, and the column of the first.
static uint32_t rapt_row(uint32_t lane) { return (lane / 4 & 4) + lane / 2 % 4; }
static uint32_t rapt_column(uint32_t lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

#define INSIDE extern "C" __attribute__((visibility("hidden")))

INSIDE void rapt_space(const char* name, void* at, uint64_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(at);
    for (uint32_t n = 0; n < num_spaces; n++) {
        if (spaces[n].begin == begin) return;
    }
    if (num_spaces == MOST_SPACES || bytes > MOST_SPACE_BYTES) fail("too much workgroup memory", name, 0, bytes);
    Space& space = spaces[num_spaces++];
    space.name = name;
    space.begin = begin;
    space.bytes = bytes;
    memset(space.cells, 0, sizeof space.cells);
}

INSIDE void rapt_atomic_store(uint32_t* at, uint32_t value) {
    access(at, 4, true, true);
    *at = value;
}

INSIDE uint32_t rapt_atomic_load(const uint32_t* at) {
    access(at, 4, false, true);
    return *at;
}

INSIDE uint32_t rapt_atomic_min(uint32_t* at, uint32_t value) {
    access(at, 4, true, true);
    const uint32_t was = *at;
    *at = value < was ? value : was;
    return was;
}

INSIDE uint32_t rapt_atomic_max(uint32_t* at, uint32_t value) {
    access(at, 4, true, true);
    const uint32_t was = *at;
    *at = value > was ? value : was;
    return was;
}

INSIDE void rapt_barrier(int line) {
    threads[me].barrier = line;
    if (_setjmp(threads[me].context) == 0) _longjmp(scheduler, 1);
}

// Gives `bytes` bytes to the other threads of the simdgroup, waits for all of theirs, and is where those of its first thread lie: this call's.
INSIDE const uint8_t* rapt_together(const void* mine, uint32_t bytes, const void* call) {
    Thread& thread = threads[me];
    const uint32_t parity = thread.calls++ % 2, first = me / LANES * LANES;
    memcpy(given[parity][me].bytes, mine, bytes);
    thread.together = call;
    if (_setjmp(thread.context) == 0) _longjmp(scheduler, 1);
    return given[parity][first].bytes;
}

INSIDE uint32_t rapt_lane() { return me % LANES; }

// The words of all threads of the simdgroup.
INSIDE __attribute__((noinline)) void rapt_exchange(uint32_t mine, uint32_t* all) {
    const uint8_t* words = rapt_together(&mine, sizeof mine, __builtin_return_address(0));
    for (uint32_t lane = 0; lane < LANES; lane++) memcpy(&all[lane], words + lane * sizeof(Given), sizeof mine);
}

// c += a·b of matrices of 8 by 8, of which a thread has two elements each, beside each other in a row: thread 8·g + l those of the row that Apple's GPUs give it.
INSIDE __attribute__((noinline)) void rapt_multiply(const float* a, const float* b, float* c) {
    const float mine[4] = {a[0], a[1], b[0], b[1]};
    const uint8_t* all = rapt_together(mine, sizeof mine, __builtin_return_address(0));
    auto element = [&](uint32_t matrix, uint32_t row, uint32_t column) {
        const uint32_t lane = (row & 4) * 4 + (row & 3) * 2 + (column & 4) * 2 + (column >> 1 & 1);
        float of[4];
        memcpy(of, all + lane * sizeof(Given), sizeof of);
        return of[matrix * 2 + column % 2];
    };
    const uint32_t lane = me % LANES, row = rapt_row(lane), column = rapt_column(lane);
    for (uint32_t k = 0; k < 8; k++) {
        const float of_a = element(0, row, k);
        for (uint32_t n = 0; n < 2; n++) c[n] = __builtin_fmaf(of_a, element(1, k, column + n), c[n]);
    }
}

namespace {

void run_thread() {
    for (;;) {
        // Another thread may go on here: `me` is read anew.
        rapt_kernel(launch->slots, group, launch->groups, me);
        threads[me].has_ended = true;
        if (_setjmp(threads[me].context) == 0) _longjmp(scheduler, 1);
    }
}

// Runs thread `me` up to its next barrier or its end.
void resume() {
    Thread& thread = threads[me];
    if (_setjmp(scheduler) != 0) return;
    if (thread.is_made) _longjmp(thread.context, 1);
    if (!thread.stack) {
        void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack == MAP_FAILED) abort();
        thread.stack = static_cast<uint8_t*>(stack);
    }
    thread.is_made = true;
    getcontext(&thread.first);
    thread.first.uc_stack.ss_sp = thread.stack;
    thread.first.uc_stack.ss_size = STACK_BYTES;
    thread.first.uc_link = nullptr;
    makecontext(&thread.first, run_thread, 0);
    setcontext(&thread.first);
}

// Runs the threads of a simdgroup up to the next barrier or their end, through all that they do together.
void run_simdgroup(uint32_t first) {
    const uint32_t end = first + LANES < launch->threads ? first + LANES : launch->threads;
    for (;;) {
        for (me = first; me < end && !has_failed; me++) {
            threads[me].together = nullptr;
            resume();
        }
        if (has_failed) return;
        for (me = first; me < end; me++) {
            const bool is_with_others = threads[me].together == threads[first].together;
            if (!is_with_others && _setjmp(scheduler) == 0) fail("threads of a simdgroup at different calls", "thread", int64_t(first), 0);
            if (has_failed) return;
        }
        if (!threads[first].together) return;
    }
}

void run_group() {
    first_epoch = ++epoch;
    for (uint32_t n = 0; n < launch->threads; n++) {
        threads[n].has_ended = false;
        threads[n].barrier = 0;
        threads[n].calls = 0;
    }
    for (;;) {
        for (uint32_t first = 0; first < launch->threads && !has_failed; first += LANES) run_simdgroup(first);
        if (has_failed) return;
        for (me = 1; me < launch->threads; me++) {
            const bool is_with_others = threads[me].has_ended == threads[0].has_ended && threads[me].barrier == threads[0].barrier;
            if (!is_with_others && _setjmp(scheduler) == 0) fail("threads at different barriers", "thread 0's line", threads[0].barrier, 0);
            if (has_failed) return;
        }
        if (threads[0].has_ended) return;
        epoch++;
    }
}

}  // namespace

// 0, or 1 with a message.
extern "C" __attribute__((visibility("default"))) int rapt_run(const Launch* of) {
    launch = of;
    has_failed = false;
    accesses = 0;
    // A thread that was ended in the middle begins anew.
    for (Thread& thread : threads) thread.is_made = false;
    for (uint32_t n = 0; n < of->num_ranges; n++) {
        written[n] = of->ranges[n].rights & WRITE ? static_cast<uint8_t*>(calloc(of->ranges[n].bytes + 1, 1)) : nullptr;
    }
    for (uint32_t y = 0; y < of->groups[1] && !has_failed; y++) {
        for (uint32_t x = 0; x < of->groups[0] && !has_failed; x++) {
            group[0] = x;
            group[1] = y;
            run_group();
        }
    }
    for (uint32_t n = 0; n < of->num_ranges; n++) free(written[n]);
    return has_failed;
}

// What the compiler calls before an access; unaligned is one of packed elements of 16 bits.
constexpr uint32_t ELEMENT = 2;
#define ACCESS(size)                                                              \
    INSIDE void __tsan_read##size(void* at) { access(at, size, false); }           \
    INSIDE void __tsan_write##size(void* at) { access(at, size, true); }           \
    INSIDE void __tsan_unaligned_read##size(void* at) { access(at, size, false, false, ELEMENT); } \
    INSIDE void __tsan_unaligned_write##size(void* at) { access(at, size, true, false, ELEMENT); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

// Copies of structs, which lie on stacks or are the parameters.
INSIDE void __tsan_read_range(void* at, uintptr_t size) {
    for (uintptr_t n = 0; n < size; n++) access(static_cast<uint8_t*>(at) + n, 1, false);
}
INSIDE void __tsan_write_range(void* at, uintptr_t size) {
    for (uintptr_t n = 0; n < size; n++) access(static_cast<uint8_t*>(at) + n, 1, true);
}
INSIDE void __tsan_init() {}
INSIDE void __tsan_func_entry(void*) {}
INSIDE void __tsan_func_exit() {}
