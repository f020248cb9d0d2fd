// Runs blocks of the kernel before it, one after another: behind a kernel's source as block.hpp is before it.

namespace host {

// What the kernel takes.
template <class Passed>
Passed taken(void (*)(Passed));
using Passed = decltype(taken(ENTRY));
inline const Passed* params;

inline void body() {
    ENTRY(*params);
    threads[running].done = true;
    let_others();
}

}  // namespace host

// False if threads wait for others that never come.
extern "C" bool launch(const void* bytes, unsigned blocks, int block_threads) {
    using namespace host;
    static Passed copied;
    std::memcpy(&copied, bytes, sizeof copied);
    params = &copied;
    count = block_threads, gridDim.x = blocks;
    for (unsigned n = 0; n < blocks; n++) {
        blockIdx.x = n;
        // What nobody has written is NaN.
        std::memset(shared, 0xff, MOST_SHARED);
        block = {0, 0, count};
        for (Together& warp : warps) warp = {0, 0, WARP};
        for (int at = 0; at < count; at++) {
            Thread& thread = threads[at];
            if (!thread.stack) thread.stack = new char[STACK];
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = thread.stack, thread.context.uc_stack.ss_size = STACK;
            thread.context.uc_link = nullptr;
            thread.begun = thread.done = false, thread.copies.clear(), thread.groups = 0;
            makecontext(&thread.context, body, 0);
        }
        for (int done = 0; done < count;) {
            is_stuck = true;
            for (int at = 0; at < count; at++) {
                if (threads[at].done) continue;
                running = at, threadIdx.x = at;
                go_on(threads[at]);
                if (threads[at].done) done++, is_stuck = false;
            }
            if (is_stuck) return false;
        }
    }
    return true;
}
