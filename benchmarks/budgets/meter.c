/* Counts the live bytes that PyTorch's CPU allocator has taken, exactly as it asked for them.
 *
 * Preloaded into a process (LD_PRELOAD). PyTorch takes the memory of every CPU tensor, and of what its kernels need for a
 * while, from posix_memalign(); nothing else of size does. The peak is that of the moment, in any thread, not a sample.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define SLOTS (1u << 20)
#define TOMBSTONE ((void *)1)

static struct { void *address; size_t nbytes; } table[SLOTS];
static atomic_flag busy = ATOMIC_FLAG_INIT;
static atomic_llong counted;
static long long live, peak;

static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

static uint32_t place(void *address) { return (uint32_t)(((uintptr_t)address >> 6) * 2654435761u) & (SLOTS - 1); }
static void lock(void) { while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)); }
static void unlock(void) { atomic_flag_clear_explicit(&busy, memory_order_release); }

int posix_memalign(void **out, size_t alignment, size_t nbytes)
{
    if (!real_memalign) real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    int failed = real_memalign(out, alignment, nbytes);
    if (failed || nbytes < 1024) return failed;
    lock();
    if (counted < SLOTS / 2) {
        uint32_t at = place(*out);
        while (table[at].address && table[at].address != TOMBSTONE) at = (at + 1) & (SLOTS - 1);
        table[at].address = *out;
        table[at].nbytes = nbytes;
        counted++;
        live += nbytes;
        if (live > peak) peak = live;
    }
    unlock();
    return 0;
}

void free(void *address)
{
    if (!real_free) real_free = dlsym(RTLD_NEXT, "free");
    if (address && atomic_load_explicit(&counted, memory_order_relaxed) && !((uintptr_t)address & 63)) {
        lock();
        for (uint32_t at = place(address); table[at].address; at = (at + 1) & (SLOTS - 1))
            if (table[at].address == address) {
                live -= table[at].nbytes;
                counted--;
                /* An entry before a free one needs no tombstone, and neither do the tombstones before it. */
                if (table[(at + 1) & (SLOTS - 1)].address) table[at].address = TOMBSTONE;
                else {
                    table[at].address = NULL;
                    while (table[at = (at - 1) & (SLOTS - 1)].address == TOMBSTONE) table[at].address = NULL;
                }
                break;
            }
        unlock();
    }
    real_free(address);
}

long long meter_live(void) { return live; }

/* The most bytes alive since the last call. */
long long meter_peak(void)
{
    lock();
    long long most = peak;
    peak = live;
    unlock();
    return most;
}
