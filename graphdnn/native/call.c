/* Variant packs that look as one that Python has checked. */

#include "native.h"

enum { ON_CUDA = 2, MAX_KEYS = 64, MAX_FREE = 64 };

typedef struct {
    Py_ssize_t slot; /* -1: the workspace */
    uint64_t offset;
} Source;

typedef struct {
    Py_ssize_t number; /* position behind the slots */
    Py_ssize_t place;  /* among the values of Launches */
    char format;       /* f, d, i, q: a Python number of it is written as this; 0: only the learned number is taken */
} Scalar;

typedef struct {
    Py_ssize_t out, other;
    uint64_t nbytes, other_nbytes, other_below;
    int same; /* the same address is fine */
} Pair;

typedef struct {
    Py_ssize_t keys;
    PyObject *key[MAX_KEYS];
    Py_ssize_t position[MAX_KEYS]; /* slots, then numbers, then the one of ignored keys */
    int ignores;                   /* whether there are any of those */
    PyObject *handle;              /* None, or a Handle */
    PyObject **number;             /* as they were given; NULL: absent */
    char *values;                  /* 8 bytes each, behind the addresses of Launches */
    uint64_t *clear;               /* addresses that were found apart */
    Facts *facts;                  /* of slots, then of the workspace */
} Look;

typedef struct {
    PyObject_HEAD
    Py_ssize_t slots, numbers, sources, scalars, pairs, owned, free; /* `free`: of the `owned` launches those that no call uses now */
    uint64_t *masks; /* alignment - 1 of slots, then of the workspace */
    Source *source;
    Scalar *scalar;
    Pair *pair;
    int needs_workspace, device;
    Launches *launches[MAX_FREE];
    Look *look;
    uint64_t *found;     /* scratch: addresses of the slots and the workspace; used while the GIL is held */
    PyObject **number;   /* scratch: numbers of this call; all NULL between calls */
    int reading;         /* a call is using `look` and the scratch: one made inside it, or by another thread, is left to Python */
} Call;

static void free_look(Call *self, Look *look) {
    if (!look) return;
    for (Py_ssize_t i = 0; i < look->keys; i++) Py_DECREF(look->key[i]);
    for (Py_ssize_t i = 0; look->number && i < self->numbers; i++) Py_XDECREF(look->number[i]);
    for (Py_ssize_t i = 0; look->facts && i <= self->slots; i++) Py_XDECREF((PyObject *)look->facts[i].type);
    Py_XDECREF(look->handle);
    PyMem_Free(look->number);
    PyMem_Free(look->values);
    PyMem_Free(look->clear);
    PyMem_Free(look->facts);
    PyMem_Free(look);
}

/* For the collector of cyclic garbage: the keys of a pack may lead back to the plan. */
static int visit_call(PyObject *object, visitproc visit, void *arg) {
    Call *self = (Call *)object;
    const Look *look = self->look;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = 0; look && i < look->keys; i++) Py_VISIT(look->key[i]);
    for (Py_ssize_t i = 0; look && i < self->numbers; i++) Py_VISIT(look->number[i]);
    for (Py_ssize_t i = 0; look && i <= self->slots; i++) Py_VISIT((PyObject *)look->facts[i].type);
    if (look) Py_VISIT(look->handle);
    return 0;
}

static int clear_call(PyObject *object) {
    Call *self = (Call *)object;
    Look *look = self->look;
    self->look = NULL;
    free_look(self, look);
    return 0;
}

static void free_call(PyObject *object) {
    Call *self = (Call *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear_call(object);
    for (Py_ssize_t i = 0; i < self->free; i++) Py_DECREF((PyObject *)self->launches[i]);
    PyMem_Free(self->masks);
    PyMem_Free(self->source);
    PyMem_Free(self->scalar);
    PyMem_Free(self->pair);
    PyMem_Free(self->found);
    PyMem_Free(self->number);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

/* Call(device, needs_workspace, masks, sources, numbers, scalars, pairs), tuples of the fields above. */
static PyObject *new_call(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *masks, *sources, *scalars, *pairs;
    int device, needs_workspace;
    Py_ssize_t numbers;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "ipO!O!nO!O!", &device, &needs_workspace, &PyTuple_Type, &masks, &PyTuple_Type, &sources, &numbers, &PyTuple_Type,
                          &scalars, &PyTuple_Type, &pairs))
        return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Call *self = (Call *)make(type, 0);
    if (!self) return NULL;
    self->device = device, self->needs_workspace = needs_workspace, self->numbers = numbers;
    self->slots = PyTuple_Size(masks) - 1;
    self->sources = PyTuple_Size(sources), self->scalars = PyTuple_Size(scalars), self->pairs = PyTuple_Size(pairs);
    self->masks = PyMem_Calloc(self->slots + 1, sizeof(uint64_t));
    self->found = PyMem_Calloc(self->slots + 1, sizeof(uint64_t));
    self->source = PyMem_Calloc(self->sources + 1, sizeof(Source));
    self->scalar = PyMem_Calloc(self->scalars + 1, sizeof(Scalar));
    self->pair = PyMem_Calloc(self->pairs + 1, sizeof(Pair));
    self->number = PyMem_Calloc(numbers + 1, sizeof(PyObject *));
    if (!self->masks || !self->found || !self->source || !self->scalar || !self->pair || !self->number) {
        PyErr_NoMemory();
        goto failed;
    }
    for (Py_ssize_t i = 0; i <= self->slots; i++) {
        self->masks[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(masks, i));
        if (PyErr_Occurred()) goto failed;
    }
    for (Py_ssize_t i = 0; i < self->sources; i++) {
        unsigned long long offset;
        if (!PyArg_ParseTuple(PyTuple_GetItem(sources, i), "nK", &self->source[i].slot, &offset)) goto failed;
        self->source[i].offset = offset;
    }
    for (Py_ssize_t i = 0; i < self->scalars; i++) {
        int format;
        if (!PyArg_ParseTuple(PyTuple_GetItem(scalars, i), "nnC", &self->scalar[i].number, &self->scalar[i].place, &format)) goto failed;
        self->scalar[i].format = (char)format;
    }
    for (Py_ssize_t i = 0; i < self->pairs; i++) {
        Pair *p = self->pair + i;
        unsigned long long a, b, c;
        if (!PyArg_ParseTuple(PyTuple_GetItem(pairs, i), "nnKKKp", &p->out, &p->other, &a, &b, &c, &p->same)) goto failed;
        p->nbytes = a, p->other_nbytes = b, p->other_below = c;
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* Whether two keys are the same: tensors by identity, uids and names by value. */
static int same_key(PyObject *a, PyObject *b) {
    if (a == b) return 1;
    if (Py_TYPE(a) != Py_TYPE(b)) return 0;
    if (Py_TYPE(a) == &PyLong_Type) return PyLong_AsLongLong(a) == PyLong_AsLongLong(b) && !PyErr_Occurred();
    return Py_TYPE(a) == &PyUnicode_Type && PyUnicode_Compare(a, b) == 0;
}

/* Write a number in place of the learned one; 0 if its type or value is another matter. An array is: what lies in it may have changed. */
static int write_number(const Scalar *s, PyObject *value, PyObject *learned, const char *kept, char *at) {
    PyTypeObject *type = value ? Py_TYPE(value) : NULL;
    if (type && type != &PyFloat_Type && type != &PyLong_Type) return 0;
    if (value == learned) {
        memcpy(at, kept, 8);
        return 1;
    }
    if (!value || !learned || type != Py_TYPE(learned)) return 0;
    memset(at, 0, 8);
    if (type == &PyFloat_Type) {
        double x = PyFloat_AsDouble(value), y = PyFloat_AsDouble(learned);
        float narrow = (float)x;
        if (s->format == 'd') memcpy(at, &x, sizeof x);
        else if (s->format == 'f') memcpy(at, &narrow, sizeof narrow);
        else if (memcmp(&x, &y, sizeof x)) return 0;
        else memcpy(at, kept, 8);
        return 1;
    }
    int overflow = 0;
    long long x = PyLong_AsLongLongAndOverflow(value, &overflow);
    int32_t narrow = (int32_t)x;
    if (overflow || !(s->format == 'q' || (s->format == 'i' && x == narrow))) return 0;
    if (s->format == 'q') memcpy(at, &x, sizeof x);
    else memcpy(at, &narrow, sizeof narrow);
    return 1;
}

static int apart(const Call *self, const uint64_t *at) {
    for (Py_ssize_t i = 0; i < self->pairs; i++) {
        const Pair *p = self->pair + i;
        uint64_t a = at[p->out], b = at[p->other];
        if (a < b + p->other_nbytes && b - p->other_below < a + p->nbytes && !(p->same && a == b)) return 0;
    }
    return 1;
}

/* Addresses into self->found and numbers into self->number; 0 for a pack that does not look as the learned one. */
static int read_pack(Call *self, const Look *look, PyObject *pack, PyObject *workspace) {
    PyObject *key, *value;
    Py_ssize_t next = 0, n = 0;
    if (Py_TYPE(pack) != &PyDict_Type || PyDict_Size(pack) != look->keys) return 0;
    memset(self->found, 0, sizeof(uint64_t) * (size_t)self->slots);
    for (; n < look->keys && PyDict_Next(pack, &next, &key, &value); n++) {
        Py_ssize_t at = look->position[n];
        if (!same_key(key, look->key[n])) {
            PyErr_Clear();
            return 0;
        }
        if (at < self->slots) {
            Py_INCREF(value); /* a subclass of tensors may run Python code when it is looked at, and that may change the pack */
            self->found[at] = address_of(look->facts + at, value, self->masks[at]);
            Py_DECREF(value);
        } else if (at < self->slots + self->numbers) {
            PyObject *before = self->number[at - self->slots];
            self->number[at - self->slots] = value == Py_None ? NULL : Py_NewRef(value);
            Py_XDECREF(before);
        }
    }
    for (Py_ssize_t i = 0; i < self->slots; i++)
        if (!self->found[i]) return 0;
    self->found[self->slots] = self->needs_workspace ? address_of(look->facts + self->slots, workspace, self->masks[self->slots]) : 0;
    return self->found[self->slots] || !self->needs_workspace;
}

/* The stream of the handle, or the framework's current one; 0 if there is something about the handle to look at. */
static int find_stream(Call *self, const Look *look, PyObject *handle, void **stream) {
    if (handle != look->handle) return 0;
    if (handle != Py_None) {
        PyObject *value = PyObject_GetAttr(handle, stream_name);
        if (!value) PyErr_Clear();
        int given = value && Py_TYPE(value) == &PyLong_Type, none = value == Py_None;
        long long at = given ? PyLong_AsLongLong(value) : -1; /* a destroyed handle has -1 */
        if (PyErr_Occurred()) PyErr_Clear(), at = -1;
        Py_XDECREF(value);
        *stream = ADDRESS(at);
        if (!none) return at >= 0;
    }
    for (Py_ssize_t i = 0; i < self->slots; i++) {
        const Exchange *exchange = look->facts[i].exchange;
        if (!exchange) continue;
        if (!exchange->current_stream(ON_CUDA, self->device, stream)) return 1;
        PyErr_Clear();
        return 0;
    }
    *stream = NULL; /* bare addresses: the default stream, unless an array under an ignored key has another */
    return !look->ignores;
}

/* Write this call's addresses and numbers; 0 if a number is another matter. */
static int write_values(const Call *self, const Look *look, Launches *into) {
    uint64_t *addresses = (uint64_t *)into->values;
    for (Py_ssize_t i = 0; i < self->sources; i++) {
        Py_ssize_t slot = self->source[i].slot;
        addresses[i] = self->found[slot < 0 ? self->slots : slot] + self->source[i].offset;
    }
    for (Py_ssize_t i = 0; i < self->scalars; i++) {
        const Scalar *s = self->scalar + i;
        if (!write_number(s, self->number[s->number], look->number[s->number], look->values + 8 * i, into->values + 8 * s->place)) return 0;
    }
    return 1;
}

/* Point the descriptors to this call's tensors; 0 if the driver does not play along. The context is current. */
static int move_descriptors(Launches *into) {
    const uint64_t *addresses = (const uint64_t *)into->values;
    for (Py_ssize_t i = 0; i < into->descriptors; i++) {
        Descriptor *d = into->descriptor + i;
        if (d->now == addresses[d->slot]) continue;
        d->now = 0;
        if (driver.move(d->memory, ADDRESS(addresses[d->slot]))) return 0;
        d->now = addresses[d->slot];
    }
    return 1;
}

/* Launch values that are this call's, filled; NULL for what Python has to look at. */
static Launches *prepared(Call *self, PyObject *const *args, void **stream) {
    const Look *look = self->look;
    size_t bytes = sizeof(uint64_t) * (size_t)self->slots;
    if (!look || !self->free || !read_pack(self, look, args[0], args[1]) || !find_stream(self, look, args[2], stream)) return NULL;
    if (memcmp(self->found, look->clear, bytes)) {
        if (!apart(self, self->found)) return NULL;
        memcpy(look->clear, self->found, bytes);
    }
    Launches *mine = self->launches[self->free - 1];
    if (!write_values(self, look, mine)) return NULL;
    self->free--;
    return mine;
}

/* run(pack, workspace, handle): whether all is enqueued; if not, nothing was done and Python has to look. Raises what the driver refuses. */
static PyObject *run(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    Call *self = (Call *)object;
    void *stream = NULL;
    if (count != 3) return PyErr_Format(PyExc_TypeError, "run takes a pack, a workspace and a handle");
    if (self->reading) Py_RETURN_FALSE;
    self->reading = 1;
    Launches *mine = prepared(self, args, &stream);
    for (Py_ssize_t i = 0; i < self->numbers; i++) {
        PyObject *number = self->number[i];
        self->number[i] = NULL;
        Py_XDECREF(number);
    }
    self->reading = 0;
    if (!mine) Py_RETURN_FALSE;
    Py_ssize_t step = 0;
    int entered = enter(mine, stream), moved = 0, result = 0;
    if (entered != REFUSED) {
        moved = move_descriptors(mine);
        if (moved) result = enqueue(mine, stream, &step);
        leave(entered);
    }
    self->launches[self->free++] = mine;
    if (entered == REFUSED || (result && refused(mine, step, result, stream))) return NULL;
    return PyBool_FromLong(moved);
}

/* learn(keys, positions, tensors, addresses, workspace, handle, numbers, values): what Python has found to fit; whether it can be recognized. */
static PyObject *learn(PyObject *object, PyObject *args) {
    Call *self = (Call *)object;
    PyObject *keys, *positions, *tensors, *addresses, *workspace, *handle, *numbers;
    const char *values;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "O!O!O!O!OOO!y#", &PyTuple_Type, &keys, &PyTuple_Type, &positions, &PyTuple_Type, &tensors, &PyTuple_Type, &addresses,
                          &workspace, &handle, &PyTuple_Type, &numbers, &values, &nbytes))
        return NULL;
    Py_ssize_t count = PyTuple_Size(keys), slots = self->slots;
    if (count > MAX_KEYS || PyTuple_Size(positions) != count || PyTuple_Size(tensors) != slots || PyTuple_Size(addresses) != slots
        || PyTuple_Size(numbers) != self->numbers || nbytes != 8 * self->scalars || self->reading)
        Py_RETURN_FALSE;
    Look *look = PyMem_Calloc(1, sizeof(Look));
    if (!look) return PyErr_NoMemory();
    look->number = PyMem_Calloc(self->numbers + 1, sizeof(PyObject *));
    look->values = PyMem_Calloc(self->scalars + 1, 8);
    look->clear = PyMem_Calloc(slots + 1, sizeof(uint64_t));
    look->facts = PyMem_Calloc(slots + 1, sizeof(Facts));
    if (!look->number || !look->values || !look->clear || !look->facts) {
        free_look(self, look);
        return PyErr_NoMemory();
    }
    memcpy(look->values, values, (size_t)nbytes);
    look->handle = Py_NewRef(handle);
    int known = 1;
    for (Py_ssize_t i = 0; i < count; i++) {
        look->key[look->keys++] = Py_NewRef(PyTuple_GetItem(keys, i));
        look->position[i] = PyLong_AsSsize_t(PyTuple_GetItem(positions, i));
        if (look->position[i] < 0) look->position[i] = slots + self->numbers, look->ignores = 1;
    }
    for (Py_ssize_t i = 0; i < self->numbers; i++) {
        PyObject *number = PyTuple_GetItem(numbers, i);
        look->number[i] = number == Py_None ? NULL : Py_NewRef(number);
    }
    for (Py_ssize_t i = 0; known && i < slots; i++) {
        PyObject *value = PyTuple_GetItem(tensors, i);
        look->clear[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(addresses, i));
        known = learn_facts(look->facts + i, value) && look->clear[i] && address_of(look->facts + i, value, self->masks[i]) == look->clear[i];
    }
    if (known && self->needs_workspace)
        known = learn_facts(look->facts + slots, workspace) && address_of(look->facts + slots, workspace, self->masks[slots]);
    if (PyErr_Occurred()) known = 0;
    if (self->reading) { /* began while a tensor ran Python code */
        free_look(self, look);
        return PyErr_Occurred() ? NULL : PyBool_FromLong(0);
    }
    Look *old = self->look;
    self->look = known ? look : NULL;
    free_look(self, known ? old : look);
    if (!known && old) free_look(self, old);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(known);
}

/* add(launches): one more set of launch values; whether there was room. As many calls can be under way at once. */
static PyObject *add(PyObject *object, PyObject *launches) {
    Call *self = (Call *)object;
    if (self->owned == MAX_FREE) Py_RETURN_FALSE;
    self->owned++;
    self->launches[self->free++] = (Launches *)Py_NewRef(launches);
    Py_RETURN_TRUE;
}

static PyMethodDef call_methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, "run(pack, workspace, handle): whether all is enqueued; else look closely."},
    {"learn", learn, METH_VARARGS, "learn(keys, positions, tensors, addresses, workspace, handle, numbers, values): whether it will be known."},
    {"add", add, METH_O, "add(launches): one more call may be under way at once."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot call_slots[] = {
    {Py_tp_new, new_call},       {Py_tp_dealloc, free_call},      {Py_tp_traverse, visit_call},
    {Py_tp_clear, clear_call},   {Py_tp_methods, call_methods},   {Py_tp_doc, "Packs that look alike."}, {0, NULL},
};
PyType_Spec call_spec = {"graphdnn._native.Call", sizeof(Call), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, call_slots};
