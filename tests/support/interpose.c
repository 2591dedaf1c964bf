/* Stands between SQLite and the kernel, for tests: counts, records, fails or ends in the middle of file operations.
 *
 * Only files whose name holds ".db" are watched; the lock file and the shared memory are not (neither is ever durable).
 * Nothing happens before attach(), whose first argument is a file of sizeof(struct control) bytes that the test maps too.
 * Its second, if not empty, is a file to which every operation is appended as a struct record and its data, in the order
 * in which they happened. A line that the program writes to a file ending in ".acknowledged" is recorded too.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

struct control {
    int64_t operations;      /* watched operations so far, over all processes that share the file */
    int64_t kill_at;         /* die before operation number kill_at (counted from 1); 0: never */
    int64_t log_syncs;       /* completed fsync and fdatasync calls of the write-ahead log */
    int64_t database_syncs;  /* ... of the database file and its rollback journal */
    int64_t directory_syncs; /* ... of directories */
    int64_t log_writes;      /* write calls to the write-ahead log */
    int32_t sync_error;      /* errno that syncs fail with; 0: none */
    int32_t sync_failures;   /* how many syncs still fail; negative: all */
    int32_t write_error;     /* errno that writes and extensions fail with; 0: none */
    int32_t injected;        /* how many calls were failed */
    int32_t log_sync_faults;       /* how many syncs of the log still fail with EIO */
    int32_t database_sync_faults;  /* ... of the database file */
    int32_t database_write_faults; /* how many writes to the database file still fail with EIO */
};

enum kind { WRITE = 1, TRUNCATE, SYNC, UNLINK, ACKNOWLEDGE, FAILED_SYNC };

struct record {
    int32_t kind;
    int32_t name_length;
    int64_t offset;
    int64_t length;
};

static struct control *control;
static int trace = -1;

void attach(const char *control_path, const char *trace_path) {
    int fd = open(control_path, O_RDWR | O_CLOEXEC);
    void *mapped = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) abort();
    close(fd);
    if (trace_path[0] != '\0' && (trace = open(trace_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) < 0) abort();
    control = mapped;
}

/* The name of an open file, without its directories; NULL if it has none, or nothing is attached. */
static const char *name_of(int fd, char *buffer, size_t size) {
    if (control == NULL) return NULL;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, buffer, size - 1);
    if (length <= 0 || buffer[0] != '/') return NULL;
    buffer[length] = '\0';
    return strrchr(buffer, '/') + 1;
}

static int ends(const char *name, const char *ending) {
    size_t length = strlen(name), tail = strlen(ending);
    return length >= tail && strcmp(name + length - tail, ending) == 0;
}

static int watched(const char *name) {
    return name != NULL && strstr(name, ".db") != NULL && !ends(name, "-shm") && !ends(name, ".lock");
}

static void record(enum kind kind, const char *name, int64_t offset, const void *data, size_t length) {
    if (trace < 0) return;
    /* One write, so that records of several threads cannot be mixed. */
    struct record head = {kind, (int32_t)strlen(name), offset, (int64_t)length};
    size_t size = sizeof head + (size_t)head.name_length + (data == NULL ? 0 : length);
    char *line = malloc(size);
    if (line == NULL) abort();
    memcpy(line, &head, sizeof head);
    memcpy(line + sizeof head, name, (size_t)head.name_length);
    if (data != NULL) memcpy(line + sizeof head + head.name_length, data, length);
    if (syscall(SYS_write, trace, line, size) != (long)size) abort();
    free(line);
}

static void step(void) {
    int64_t number = __atomic_add_fetch(&control->operations, 1, __ATOMIC_SEQ_CST);
    if (number == control->kill_at) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
}

static int fails(int error) {
    if (error == 0) return 0;
    __atomic_add_fetch(&control->injected, 1, __ATOMIC_SEQ_CST);
    errno = error;
    return 1;
}

/* A fault that happens so many times. */
static int faulty(int32_t *faults) {
    if (*faults <= 0) return 0;
    (*faults)--;
    return fails(EIO);
}

static ssize_t positioned_write(int fd, const void *data, size_t length, off_t offset) {
    char buffer[4096];
    const char *name = name_of(fd, buffer, sizeof buffer);
    if (watched(name)) {
        step();
        if (fails(control->write_error)) return -1;
        if (ends(name, ".db") && faulty(&control->database_write_faults)) return -1;
        if (ends(name, "-wal")) __atomic_add_fetch(&control->log_writes, 1, __ATOMIC_SEQ_CST);
        record(WRITE, name, offset, data, length);
    }
    return syscall(SYS_pwrite64, fd, data, length, offset);
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) {
    return positioned_write(fd, data, length, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) {
    return positioned_write(fd, data, length, offset);
}

ssize_t write(int fd, const void *data, size_t length) {
    char buffer[4096];
    const char *name = name_of(fd, buffer, sizeof buffer);
    /* SQLite extends the shared memory with write, which a full disk stops too. */
    if (name != NULL && ends(name, "-shm") && fails(control->write_error)) return -1;
    ssize_t written = syscall(SYS_write, fd, data, length);
    if (name != NULL && ends(name, ".acknowledged")) record(ACKNOWLEDGE, name, 0, data, length);
    return written;
}

static int truncated(int fd, off_t length) {
    char buffer[4096];
    const char *name = name_of(fd, buffer, sizeof buffer);
    if (watched(name)) {
        step();
        record(TRUNCATE, name, length, NULL, 0);
    }
    return (int)syscall(SYS_ftruncate, fd, length);
}

int ftruncate(int fd, off_t length) { return truncated(fd, length); }

int ftruncate64(int fd, off64_t length) { return truncated(fd, length); }

static int synced(int fd, long call) {
    char buffer[4096];
    const char *name = name_of(fd, buffer, sizeof buffer);
    if (!watched(name)) {
        int done = (int)syscall(call, fd);
        if (name != NULL) {
            __atomic_add_fetch(&control->directory_syncs, 1, __ATOMIC_SEQ_CST);
            record(SYNC, "", 0, NULL, 0);
        }
        return done;
    }
    step();
    if (control->sync_error != 0 && control->sync_failures != 0) {
        if (control->sync_failures > 0) control->sync_failures--;
        record(FAILED_SYNC, name, 0, NULL, 0);
        if (fails(control->sync_error)) return -1;
    }
    if (faulty(ends(name, "-wal") ? &control->log_sync_faults : &control->database_sync_faults)) {
        record(FAILED_SYNC, name, 0, NULL, 0);
        return -1;
    }
    int answer = (int)syscall(call, fd);
    if (answer == 0) {
        int64_t *count = ends(name, "-wal") ? &control->log_syncs : &control->database_syncs;
        __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
        record(SYNC, name, 0, NULL, 0);
    }
    return answer;
}

int fsync(int fd) { return synced(fd, SYS_fsync); }

int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

int unlink(const char *path) {
    const char *name = strrchr(path, '/');
    name = name == NULL ? path : name + 1;
    if (control != NULL && watched(name)) {
        step();
        record(UNLINK, name, 0, NULL, 0);
    }
    return (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}
