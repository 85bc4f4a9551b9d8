// Preloaded into a command and its ranks: notes which files below a folder are opened for writing, and lets a named one fail.
//
//   DISK_FAULT_ROOT=FOLDER           what lies below it is watched
//   DISK_FAULT_LOG=FILE              a line for each file that is opened for writing or folder (NAME/) that is made
//   DISK_FAULT=ERRNO:CALL:PART       CALL (write, open, mkdir) on a path that has PART in it fails with ERRNO
//   DISK_FAULT_ONCE=FILE             ... one time in all processes; the file says that it has happened
//   DISK_FAULT_SINCE=PATH            ... once there is such a path
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

template <typename F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

bool below(const char* path, char* whole) {
  const char* root = getenv("DISK_FAULT_ROOT");
  if (!root) return false;
  if (path[0] == '/') {
    snprintf(whole, PATH_MAX, "%s", path);
  } else {
    char here[PATH_MAX];
    if (!getcwd(here, sizeof here)) return false;
    snprintf(whole, PATH_MAX, "%s/%s", here, path);
  }
  return strncmp(whole, root, strlen(root)) == 0;
}

void note(const char* whole, const char* end) {
  const char* log = getenv("DISK_FAULT_LOG");
  if (!log) return;
  const int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file < 0) return;
  char line[PATH_MAX + 2];
  const int size = snprintf(line, sizeof line, "%s%s\n", whole, end);
  syscall(SYS_write, file, line, size);
  syscall(SYS_close, file);
}

// Whether this call on this path has to fail; errno is set then.
bool fails(const char* call, const char* whole) {
  const char* fault = getenv("DISK_FAULT");
  if (!fault) return false;
  char* rest;
  const int number = strtol(fault, &rest, 10);
  const size_t length = strlen(call);
  if (rest[0] != ':' || strncmp(rest + 1, call, length) || rest[length + 1] != ':') return false;
  if (!strstr(whole, rest + length + 2)) return false;
  if (const char* since = getenv("DISK_FAULT_SINCE")) {
    if (access(since, F_OK)) return false;
  }
  if (const char* once = getenv("DISK_FAULT_ONCE")) {
    const int file = syscall(SYS_openat, AT_FDCWD, once, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (file < 0) return false;
    syscall(SYS_close, file);
  }
  errno = number;
  return true;
}

bool open_fails(const char* path, int flags) {
  char whole[PATH_MAX];
  if (!(flags & (O_WRONLY | O_RDWR | O_CREAT)) || !below(path, whole)) return false;
  note(whole, "");
  return fails("open", whole);
}

bool write_fails(int file) {
  if (!getenv("DISK_FAULT")) return false;
  char link[64], whole[PATH_MAX], target[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t size = readlink(link, target, sizeof target - 1);
  if (size < 0) return false;
  target[size] = 0;
  return target[0] == '/' && below(target, whole) && fails("write", whole);
}

}  // namespace

#define OPEN(NAME)                                              \
  int NAME(const char* path, int flags, ...) {                  \
    va_list rest;                                               \
    va_start(rest, flags);                                      \
    const mode_t mode = va_arg(rest, mode_t);                   \
    va_end(rest);                                               \
    if (open_fails(path, flags)) return -1;                     \
    static const auto real = next<int (*)(const char*, int, ...)>(#NAME); \
    return real(path, flags, mode);                             \
  }
#define OPENAT(NAME)                                            \
  int NAME(int folder, const char* path, int flags, ...) {      \
    va_list rest;                                               \
    va_start(rest, flags);                                      \
    const mode_t mode = va_arg(rest, mode_t);                   \
    va_end(rest);                                               \
    if ((folder == AT_FDCWD || path[0] == '/') && open_fails(path, flags)) return -1; \
    static const auto real = next<int (*)(int, const char*, int, ...)>(#NAME); \
    return real(folder, path, flags, mode);                     \
  }
#define FOPEN(NAME)                                             \
  FILE* NAME(const char* path, const char* mode) {              \
    if (strpbrk(mode, "wa+") && open_fails(path, O_WRONLY)) return nullptr; \
    static const auto real = next<FILE* (*)(const char*, const char*)>(#NAME); \
    return real(path, mode);                                    \
  }

extern "C" {
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)

int mkdir(const char* path, mode_t mode) {
  char whole[PATH_MAX];
  if (below(path, whole)) {
    note(whole, "/");
    if (access(whole, F_OK) && fails("mkdir", whole)) return -1;
  }
  static const auto real = next<int (*)(const char*, mode_t)>("mkdir");
  return real(path, mode);
}
ssize_t write(int file, const void* data, size_t size) {
  if (write_fails(file)) return -1;
  static const auto real = next<ssize_t (*)(int, const void*, size_t)>("write");
  return real(file, data, size);
}
ssize_t writev(int file, const struct iovec* parts, int count) {
  if (write_fails(file)) return -1;
  static const auto real = next<ssize_t (*)(int, const struct iovec*, int)>("writev");
  return real(file, parts, count);
}
ssize_t pwrite64(int file, const void* data, size_t size, off64_t at) {
  if (write_fails(file)) return -1;
  static const auto real = next<ssize_t (*)(int, const void*, size_t, off64_t)>("pwrite64");
  return real(file, data, size, at);
}
ssize_t pwrite(int file, const void* data, size_t size, off_t at) { return pwrite64(file, data, size, at); }
}
