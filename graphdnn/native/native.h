/* The hot part of execute() on a GPU: reads a variant pack and launches, without running Python code. Graphdnn's Python beside it is in
   targets/native.py and plans/known.py.

   `Launches` (launches.c) enqueues prepared driver calls. `Call` (call.c, facts.c) recognizes a pack that looks like one that Python has checked,
   writes its addresses and numbers into launch values, and enqueues them. Whatever it does not recognize it leaves alone: Python then looks closely
   and says what is wrong. So every check here decides only "as before" or "not as before". Nothing here allocates device memory or holds a lock; the
   GIL guards all state and is released around the driver's calls only; a tensor class of the user's may run Python code when it is looked at.

   Tensors are read through the exchange table that a framework's tensor type shows (DLPack 1.3, "C exchange API"): address, device, data type, dims
   and strides in one call. Limited API of Python 3.11, so one binary serves all later versions. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------------------------ layouts of others' interfaces */
typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} View; /* DLTensor */

typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *export_tensor, *import_tensor;
    int (*view)(void *object, View *out);
    int (*current_stream)(int device_type, int32_t device_id, void **out);
} Exchange; /* DLPackExchangeAPI, major version 1 */

typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream, *attributes;
    unsigned attribute_count;
} Config; /* CUlaunchConfig */

#define ADDRESS(x) ((void *)(uintptr_t)(x))

typedef struct {
    int (*launch)(const Config *, void *function, void **parameters, void **extra);
    int (*set)(uint64_t at, unsigned char value, size_t nbytes, void *stream);
    int (*current)(void **context);
    int (*push)(void *context);
    int (*pop)(void **context);
    int (*move)(void *descriptor, void *address);
} Driver;
/* -------------------------------------------------------------------------------------------------------------------------------- shared */
#pragma GCC visibility push(hidden) /* no symbol but the module's is seen by other libraries, or taken from them */

extern Driver driver;
extern int forked;            /* in a child of a process that had loaded this: Python refuses there what the driver cannot do */
extern PyObject *stream_name, *negated_name; /* "stream", "is_neg" */
extern PyType_Spec launches_spec, call_spec;

typedef struct {
    Config *config; /* NULL: a memset of `nbytes` bytes at *target */
    void *function, **parameters;
    uint64_t *target;
    unsigned char value;
    size_t nbytes;
} Step;

typedef struct {
    void *memory;
    Py_ssize_t slot;
    uint64_t now;
} Descriptor;

typedef struct {
    PyObject_HEAD
    PyObject *keep; /* owns the memory that the steps point to */
    PyObject *fail; /* fail(step, CUresult, stream) raises */
    void *context;
    char *values; /* addresses, then numbers, 8 bytes each */
    Py_ssize_t steps, descriptors;
    Step *step;
    Descriptor *descriptor;
} Launches;

enum { THERE, ENTERED, REFUSED };

/* Raise what the driver refused: REFUSED. */
int refused(const Launches *self, Py_ssize_t step, int result, void *stream);

/* Make the context current for the driver's calls, if it is not: REFUSED with an exception if that cannot be, or the process is a fork. */
int enter(const Launches *self, void *stream);

void leave(int entered);

/* Enqueue the steps: CUresult, and the step that gave it. */
int enqueue(Launches *self, void *stream, Py_ssize_t *at);

enum { MAX_RANK = 16 };

typedef struct {
    PyTypeObject *type;       /* NULL: nothing is expected, and nothing looked at */
    const Exchange *exchange; /* NULL: an address, as int */
    int32_t ndim, device_type, device_id;
    int maybe_negated; /* looks as the imaginary part of complex numbers may, which torch negates when it is read */
    uint32_t dtype;
    int64_t dims[2 * MAX_RANK]; /* shape, then strides */
} Facts;

/* The address in `value` if it looks as `facts` says and is a multiple of mask + 1; 0 if not, or if it is null. May run code of the value's class. */
uint64_t address_of(const Facts *facts, PyObject *value, uint64_t mask);

/* Fill `facts` from a value that Python has found to fit; 0 for one that cannot be recognized later. */
int learn_facts(Facts *facts, PyObject *value);

#pragma GCC visibility pop
