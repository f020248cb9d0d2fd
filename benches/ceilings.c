/* What this machine can do at this moment: the ceilings that a row's time is held against.
 *
 *     compute  ->  {"ghz", "fma_f32": {"ymm": GF, "zmm": GF}, "bf16_dot": {...}}     all threads together, one clock per thread
 *     memory   ->  {"dram_read_gbs"}                                               every thread reads its own share once per pass
 *
 * One command per line on stdin, one line of JSON per answer. Arguments: bytes to read per pass, then the CPUs to pin threads to.
 * Each figure is the best of several short repeats: a ceiling is what the silicon can do, not what it did under a neighbour.
 * Between commands the process sleeps in read(): it takes nothing from the peer being timed.
 * Absent: AMX and SVE (no machine to try them on), f16 arithmetic (attention accumulates in f32).
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#if (defined(__clang__) && __clang_major__ >= 9) || (!defined(__clang__) && __GNUC__ >= 10)
#define HAS_BF16_INTRINSICS 1
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { MAX_THREADS = 1024, REPEATS = 5 };

static int threads;
static int cpus[MAX_THREADS];
static size_t bytes_per_thread;
static char *buffers[MAX_THREADS];
static volatile float seed = 1e-8f; /* volatile: nothing below may be computed at compile time */
static volatile float sink[MAX_THREADS];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* A kernel does `rounds` rounds of its work and returns something that depends on all of it. */
typedef float (*kernel)(long rounds, const char *buffer, size_t bytes);

/* One dependent multiply takes 3 cycles on every x86-64 and aarch64 core of the last ten years, and no renamer folds it away
 * as it does an addition of a constant: 24 of them per round = 72 cycles. */
static float clock_chain(long rounds, const char *buffer, size_t bytes) {
    uint64_t x = (uintptr_t)buffer | 1;
    const uint64_t factor = bytes | 1;
    for (long r = 0; r < rounds; r++) {
#if defined(__x86_64__)
#define MUL "imul %1, %0\n\t"
#elif defined(__aarch64__)
#define MUL "mul %0, %0, %1\n\t"
#endif
#ifdef MUL
#define MUL8 MUL MUL MUL MUL MUL MUL MUL MUL
        __asm__ volatile(MUL8 MUL8 MUL8 : "+r"(x) : "r"(factor));
#endif
    }
    return (float)x;
}

#if defined(__x86_64__)
/* 12 accumulators hide the 4 cycles of two FMA units and leave 4 of the 16 ymm registers; zmm has 32 registers: 24.
 * Every accumulator starts different, or the compiler keeps one of them. */
__attribute__((target("avx,fma"))) static float fma_ymm(long rounds, const char *buffer, size_t bytes) {
    (void)buffer, (void)bytes;
    const __m256 a = _mm256_set1_ps(1.0f - seed), b = _mm256_set1_ps(seed);
    __m256 acc[12];
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) acc[i] = _mm256_set1_ps(seed * i);
    for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) acc[i] = _mm256_fmadd_ps(acc[i], a, b);
    }
    for (int i = 1; i < 12; i++) acc[0] = _mm256_add_ps(acc[0], acc[i]);
    return _mm256_cvtss_f32(acc[0]);
}

__attribute__((target("avx512f"))) static float fma_zmm(long rounds, const char *buffer, size_t bytes) {
    (void)buffer, (void)bytes;
    const __m512 a = _mm512_set1_ps(1.0f - seed), b = _mm512_set1_ps(seed);
    __m512 acc[24];
#pragma GCC unroll 24
    for (int i = 0; i < 24; i++) acc[i] = _mm512_set1_ps(seed * i);
    for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 24
        for (int i = 0; i < 24; i++) acc[i] = _mm512_fmadd_ps(acc[i], a, b);
    }
    for (int i = 1; i < 24; i++) acc[0] = _mm512_add_ps(acc[0], acc[i]);
    return _mm512_cvtss_f32(acc[0]);
}

#ifdef HAS_BF16_INTRINSICS
/* The operands are bit patterns of small bf16 numbers; the products vanish beside the accumulators, which therefore stay finite. */
__attribute__((target("avx512f,avx512bf16"))) static float dot_zmm(long rounds, const char *buffer, size_t bytes) {
    (void)buffer, (void)bytes;
    const __m512bh a = (__m512bh)_mm512_set1_ps(seed), b = (__m512bh)_mm512_set1_ps(seed);
    __m512 acc[24];
#pragma GCC unroll 24
    for (int i = 0; i < 24; i++) acc[i] = _mm512_set1_ps(seed * i);
    for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 24
        for (int i = 0; i < 24; i++) acc[i] = _mm512_dpbf16_ps(acc[i], a, b);
    }
    for (int i = 1; i < 24; i++) acc[0] = _mm512_add_ps(acc[0], acc[i]);
    return _mm512_cvtss_f32(acc[0]);
}
#endif

/* Two read streams per thread: one stream leaves the hardware prefetcher short at the page ends. */
__attribute__((target("avx"))) static float read_memory(long rounds, const char *buffer, size_t bytes) {
    __m256 acc[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) acc[i] = _mm256_setzero_ps();
    const size_t half = bytes / 2;
    for (long r = 0; r < rounds; r++)
        for (size_t at = 0; at < half; at += 128) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                acc[i] = _mm256_or_ps(acc[i], _mm256_load_ps((const float *)(buffer + at) + 8 * i));
                acc[4 + i] = _mm256_or_ps(acc[4 + i], _mm256_load_ps((const float *)(buffer + half + at) + 8 * i));
            }
        }
    for (int i = 1; i < 8; i++) acc[0] = _mm256_or_ps(acc[0], acc[i]);
    return _mm256_cvtss_f32(acc[0]);
}

#else /* not x86-64: compiled, not yet tried on a machine */
#if defined(__aarch64__)
static float fma_neon(long rounds, const char *buffer, size_t bytes) {
    (void)buffer, (void)bytes;
    const float32x4_t a = vdupq_n_f32(1.0f - seed), b = vdupq_n_f32(seed);
    float32x4_t acc[24];
#pragma GCC unroll 24
    for (int i = 0; i < 24; i++) acc[i] = vdupq_n_f32(seed * i);
    for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 24
        for (int i = 0; i < 24; i++) acc[i] = vfmaq_f32(b, acc[i], a);
    }
    for (int i = 1; i < 24; i++) acc[0] = vaddq_f32(acc[0], acc[i]);
    return vgetq_lane_f32(acc[0], 0);
}
#endif
static float read_memory(long rounds, const char *buffer, size_t bytes) {
    uint64_t acc[4] = {0, 0, 0, 0};
    for (long r = 0; r < rounds; r++)
        for (size_t at = 0; at < bytes; at += 32)
            for (int i = 0; i < 4; i++) acc[i] |= ((const uint64_t *)(buffer + at))[i];
    return (float)(acc[0] | acc[1] | acc[2] | acc[3]);
}
#endif

static kernel work;
static long work_rounds;
static pthread_barrier_t gate;
static double began[MAX_THREADS], ended[MAX_THREADS];

static void pin(int thread) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[thread], &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
    (void)thread;
#endif
}

static void *one_thread(void *argument) {
    const int thread = (int)(intptr_t)argument;
    pin(thread);
    pthread_barrier_wait(&gate);
    began[thread] = now();
    sink[thread] = work(work_rounds, buffers[thread], bytes_per_thread);
    ended[thread] = now();
    return NULL;
}

/* Seconds from the first start to the last end. */
static double run(kernel k, long rounds) {
    pthread_t handles[MAX_THREADS];
    work = k;
    work_rounds = rounds;
    pthread_barrier_init(&gate, NULL, threads);
    for (intptr_t t = 0; t < threads; t++) pthread_create(&handles[t], NULL, one_thread, (void *)t);
    for (int t = 0; t < threads; t++) pthread_join(handles[t], NULL);
    pthread_barrier_destroy(&gate);
    double first = began[0], last = ended[0];
    for (int t = 1; t < threads; t++) {
        if (began[t] < first) first = began[t];
        if (ended[t] > last) last = ended[t];
    }
    return last - first;
}

static double quickest(kernel k, long rounds, int repeats) {
    double best = run(k, rounds);
    for (int i = 1; i < repeats; i++) {
        const double again = run(k, rounds);
        if (again < best) best = again;
    }
    return best;
}

/* Rounds per second of all threads together, the best of REPEATS repeats of about `seconds`. The number of rounds is found with
 * the quickest of three as well: one descheduled thread must not end the search at a handful of rounds. */
static double rate(kernel k, double seconds) {
    long rounds = 1024;
    double took = quickest(k, rounds, 3);
    while (took < seconds / 2) {
        rounds *= took < seconds / 32 ? 8 : 2;
        took = quickest(k, rounds, 3);
    }
    return threads * (double)rounds / quickest(k, rounds, REPEATS);
}

static void compute(void) {
    printf("{\"threads\": %d, \"ghz\": %.4f", threads, rate(clock_chain, 2e-3) * 72e-9 / threads);
    printf(", \"fma_f32\": {");
#if defined(__x86_64__)
    const char *comma = "";
    if (__builtin_cpu_supports("fma")) printf("\"ymm\": %.2f", rate(fma_ymm, 4e-3) * 12 * 16e-9), comma = ", ";
    if (__builtin_cpu_supports("avx512f")) printf("%s\"zmm\": %.2f", comma, rate(fma_zmm, 4e-3) * 24 * 32e-9);
#elif defined(__aarch64__)
    printf("\"neon\": %.2f", rate(fma_neon, 4e-3) * 24 * 8e-9);
#endif
    printf("}, \"bf16_dot\": {");
#ifdef HAS_BF16_INTRINSICS
    if (__builtin_cpu_supports("avx512bf16")) printf("\"zmm\": %.2f", rate(dot_zmm, 4e-3) * 24 * 64e-9);
#endif
    printf("}}\n");
}

static void memory(void) {
    for (int t = 0; t < threads; t++)
        if (!buffers[t]) {
            if (posix_memalign((void **)&buffers[t], 1 << 21, bytes_per_thread)) exit(2);
            memset(buffers[t], 1, bytes_per_thread);
        }
    double best = 0;
    for (int i = 0; i < REPEATS; i++) {
        const double gbs = 1e-9 * threads * bytes_per_thread / run(read_memory, 1);
        if (gbs > best) best = gbs;
    }
    printf("{\"threads\": %d, \"dram_read_gbs\": %.2f}\n", threads, best);
}

int main(int count, char **arguments) {
    if (count < 3) return fprintf(stderr, "usage: ceilings BYTES CPU...\n"), 2;
    threads = count - 2 > MAX_THREADS ? MAX_THREADS : count - 2;
    for (int t = 0; t < threads; t++) cpus[t] = atoi(arguments[2 + t]);
    bytes_per_thread = (strtoull(arguments[1], NULL, 10) / threads + 255) / 256 * 256;
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        if (!strncmp(line, "compute", 7)) compute();
        else if (!strncmp(line, "memory", 6)) memory();
        else break;
        fflush(stdout);
    }
    return 0;
}
