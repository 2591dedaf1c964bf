/* Makes every fsync and fdatasync of a process take FSYNC_DELAY_US microseconds longer, as on a disk
 * that is reached over a network. Loaded with LD_PRELOAD; built by fsync_delay.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <time.h>

static void delay(void) {
    const char *text = getenv("FSYNC_DELAY_US");
    long microseconds = text ? atol(text) : 0;
    struct timespec left = {microseconds / 1000000, (microseconds % 1000000) * 1000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

int fsync(int descriptor) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    delay();
    return real(descriptor);
}

int fdatasync(int descriptor) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    delay();
    return real(descriptor);
}
