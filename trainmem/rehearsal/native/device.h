// The rehearsed devices, and how much of their memory each process holds. Everything comes from the environment
// (variables_of in trainmem/rehearsal/rehearsal_process.py sets it):
//   REHEARSAL_CAPABILITY     compute capability, 90 for 9.0
//   REHEARSAL_BYTES          memory of a device
//   REHEARSAL_CONTEXT_BYTES  assumed size of a context; each driver has its own
//   REHEARSAL_DEVICES        number of devices
//   REHEARSAL_NAME           their name
//   REHEARSAL_LEDGER         a file that all processes of a rehearsal share
//   REHEARSAL_LIBRARIES      1 if cuFFT and cuSPARSE are assumed to need no workspace; the program's process sets it
//   CUDA_VISIBLE_DEVICES     as CUDA reads it, numbers and "GPU-..." names
#pragma once
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace rehearsal {

inline long number(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

inline int capability() { return (int)number("REHEARSAL_CAPABILITY", 80); }
inline size_t total_bytes() { return (size_t)number("REHEARSAL_BYTES", 80L << 30); }
inline size_t context_bytes() { return (size_t)number("REHEARSAL_CONTEXT_BYTES", 500L << 20); }
inline int devices() { return (int)number("REHEARSAL_DEVICES", 1); }
inline const char* name() { return getenv("REHEARSAL_NAME") ? getenv("REHEARSAL_NAME") : "rehearsed GPU"; }
inline int unless_assumed(int status) { return number("REHEARSAL_LIBRARIES", 0) ? 0 : status; }
constexpr size_t DRIVER_RESERVE = 600u << 20;  // NVML's older call counts it as used

// Limits that depend only on the compute capability (CUDA Programming Guide, "Technical Specifications per Compute
// Capability"; multiprocessors of the T4, A100, A10, H100, B200 and RTX 5090).
struct Limits {
    int multiprocessors;
    int shared_per_multiprocessor, shared_opt_in;  // bytes per multiprocessor, and the most that a block can request
    int threads_per_multiprocessor, l2_bytes;
};
inline Limits limits() {
    int now = capability();
    if (now >= 120) return {170, 102400, 101376, 1536, 96 << 20};
    if (now >= 100) return {148, 233472, 232448, 2048, 126 << 20};
    if (now >= 90) return {132, 233472, 232448, 2048, 50 << 20};
    if (now == 80) return {108, 167936, 166912, 2048, 40 << 20};
    if (now > 80) return {80, 102400, 101376, 1536, 6 << 20};
    return {40, 65536, 65536, 1024, 4 << 20};
}

inline void uuid(int device, unsigned char* bytes) {
    for (int i = 0; i < 16; i++) bytes[i] = (unsigned char)(i + 1);
    bytes[15] = (unsigned char)(device + 1);
}
inline std::string uuid_text(int device) {
    unsigned char b[16];
    uuid(device, b);
    char text[48];
    snprintf(text, sizeof text, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1],
             b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
    return text;
}

// The devices that CUDA shows, in its order: the first invalid entry ends the list.
inline std::vector<int> visible() {
    std::vector<int> shown;
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        for (int i = 0; i < devices(); i++) shown.push_back(i);
        return shown;
    }
    std::stringstream entries(text);
    for (std::string entry; std::getline(entries, entry, ',');) {
        int found = -1;
        if (entry.rfind("GPU-", 0) == 0) {
            for (int i = 0; i < devices(); i++)
                if (uuid_text(i).rfind(entry, 0) == 0) found = i;
        } else if (!entry.empty() && entry.find_first_not_of(" +0123456789") == std::string::npos) {
            found = atoi(entry.c_str());
        }
        if (found < 0 || found >= devices()) break;
        shown.push_back(found);
    }
    return shown;
}

// The device to which CUDA gives this number, or -1.
inline int at(int number) {
    auto shown = visible();
    return number >= 0 && number < (int)shown.size() ? shown[number] : -1;
}

// The text of an error; the runtime and the driver use the same numbers.
inline const char* error_text(int error) {
    switch (error) {
        case 0: return "no error";
        case 1: return "invalid argument";
        case 2: return "out of memory";
        case 100: return "no CUDA-capable device is detected";
        case 101: return "invalid device ordinal";
        default: return "not answered in a rehearsal";
    }
}

// The ledger: a row per process and device.
struct Row {
    int pid, device;  // the device as NVML numbers it
    size_t bytes;     // allocated, without the context
};
constexpr int ROWS = 1024;

inline Row* ledger() {
    static Row* rows = [] {
        const char* path = getenv("REHEARSAL_LEDGER");
        int file = path ? open(path, O_RDWR | O_CREAT, 0600) : -1;
        if (file >= 0 && ftruncate(file, ROWS * sizeof(Row))) file = -1;
        void* at = mmap(nullptr, ROWS * sizeof(Row), PROT_READ | PROT_WRITE,
                        file >= 0 ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS, file, 0);
        return at == MAP_FAILED ? nullptr : (Row*)at;
    }();
    return rows;
}

// Holds the ledger's lock while it lives. It opens the file itself: a lock belongs to an opening, which forks would share.
struct Locked {
    int file;
    Locked() : file(getenv("REHEARSAL_LEDGER") ? open(getenv("REHEARSAL_LEDGER"), O_RDWR) : -1) {
        if (file >= 0) flock(file, LOCK_EX);
    }
    ~Locked() {
        if (file >= 0) close(file);
    }
};

inline bool alive(int pid) { return pid && (kill(pid, 0) == 0 || errno == EPERM); }

// Bytes in use on a device by all processes, contexts included. The caller holds the lock.
inline size_t used_bytes(int device) {
    size_t sum = 0;
    for (int i = 0; i < ROWS; i++)
        if (ledger()[i].device == device && alive(ledger()[i].pid)) sum += ledger()[i].bytes + context_bytes();
    return sum;
}

// This process's row; it is made on first use, which creates the context. The caller holds the lock.
inline Row* own(int device) {
    Row *free_row = nullptr, *rows = ledger();
    for (int i = 0; i < ROWS; i++) {
        if (rows[i].pid == getpid() && rows[i].device == device) return &rows[i];
        if (!free_row && !alive(rows[i].pid)) free_row = &rows[i];
    }
    if (free_row) *free_row = {getpid(), device, 0};
    return free_row;
}

// Takes bytes of a device; returns false if they are not free.
inline bool take(int device, size_t bytes) {
    Locked lock;
    Row* row = own(device);
    if (!row || used_bytes(device) + bytes > total_bytes()) return false;
    row->bytes += bytes;
    return true;
}
inline void give(int device, size_t bytes) {
    Locked lock;
    if (Row* row = own(device)) row->bytes -= bytes < row->bytes ? bytes : row->bytes;
}
inline void memory(int device, bool context, size_t* free, size_t* total) {
    Locked lock;
    if (context) own(device);
    size_t used = used_bytes(device);
    *total = total_bytes();
    *free = used < *total ? *total - used : 0;
}

// Address space without memory: a page that is never touched costs nothing.
inline void* reserve(size_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : at;
}

// A unique address, for handles that are never dereferenced.
inline void* handle() {
    static uintptr_t next = 0x10000;
    return (void*)__sync_add_and_fetch(&next, 0x100);
}

}  // namespace rehearsal
