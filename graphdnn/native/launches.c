/* Prepared driver calls that are enqueued together. */

#include "native.h"

static int visit_launches(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Launches *)object)->keep);
    Py_VISIT(((Launches *)object)->fail);
    return 0;
}

static int clear_launches(PyObject *object) {
    PyObject *fail = ((Launches *)object)->fail; /* what is kept leads to nothing, and calls may be under way */
    ((Launches *)object)->fail = NULL;
    Py_XDECREF(fail);
    return 0;
}

static void free_launches(PyObject *object) {
    Launches *self = (Launches *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear_launches(object);
    Py_XDECREF(self->keep);
    PyMem_Free(self->step);
    PyMem_Free(self->descriptor);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

/* Launches(keep, fail, context, values, steps, descriptors): steps (config, function, parameters) or (0, target, value, nbytes); (memory, slot). */
static PyObject *new_launches(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *keep, *fail, *steps, *descriptors;
    unsigned long long context, values;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOKKO!O!", &keep, &fail, &context, &values, &PyTuple_Type, &steps, &PyTuple_Type, &descriptors)) return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Launches *self = (Launches *)make(type, 0);
    if (!self) return NULL;
    self->keep = Py_NewRef(keep);
    self->fail = Py_NewRef(fail);
    self->context = ADDRESS(context);
    self->values = ADDRESS(values);
    self->steps = PyTuple_Size(steps);
    self->descriptors = PyTuple_Size(descriptors);
    self->step = PyMem_Calloc(self->steps + 1, sizeof(Step));
    self->descriptor = PyMem_Calloc(self->descriptors + 1, sizeof(Descriptor));
    if (!self->step || !self->descriptor) goto memory;
    for (Py_ssize_t i = 0; i < self->steps; i++) {
        unsigned long long a, b, c, d = 0;
        if (!PyArg_ParseTuple(PyTuple_GetItem(steps, i), "KKK|K", &a, &b, &c, &d)) goto failed;
        self->step[i] = a ? (Step){ADDRESS(a), ADDRESS(b), ADDRESS(c), NULL, 0, 0}
                          : (Step){NULL, NULL, NULL, ADDRESS(b), (unsigned char)c, (size_t)d};
    }
    for (Py_ssize_t i = 0; i < self->descriptors; i++) {
        unsigned long long memory;
        Py_ssize_t slot;
        if (!PyArg_ParseTuple(PyTuple_GetItem(descriptors, i), "Kn", &memory, &slot)) goto failed;
        self->descriptor[i] = (Descriptor){ADDRESS(memory), slot, 0};
    }
    return (PyObject *)self;
memory:
    PyErr_NoMemory();
failed:
    Py_DECREF(self);
    return NULL;
}

int refused(const Launches *self, Py_ssize_t step, int result, void *stream) {
    PyObject *done = PyObject_CallFunction(self->fail, "niK", step, result, (unsigned long long)(uintptr_t)stream);
    if (done) PyErr_SetString(PyExc_SystemError, "a failure was not raised");
    Py_XDECREF(done);
    return REFUSED;
}

int enter(const Launches *self, void *stream) {
    void *current = NULL;
    int result = forked ? 0 : driver.current(&current);
    if (!forked && !result && current == self->context) return THERE;
    if (!forked && !result) result = driver.push(self->context);
    return forked || result ? refused(self, -1, result, stream) : ENTERED;
}

void leave(int entered) {
    void *ours;
    if (entered == ENTERED) driver.pop(&ours);
}

int enqueue(Launches *self, void *stream, Py_ssize_t *at) {
    int result = 0;
    Py_ssize_t i;
    Py_BEGIN_ALLOW_THREADS
    for (i = 0; i < self->steps && !result; i++) {
        Step *step = self->step + i;
        if (step->config) {
            step->config->stream = stream;
            result = driver.launch(step->config, step->function, step->parameters, NULL);
        } else {
            result = driver.set(*step->target, step->value, step->nbytes, stream);
        }
    }
    Py_END_ALLOW_THREADS
    *at = i - 1;
    return result;
}

static PyObject *launch(PyObject *object, PyObject *given) {
    Launches *self = (Launches *)object;
    unsigned long long at = PyLong_AsUnsignedLongLong(given);
    if (at == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
    void *stream = ADDRESS(at);
    Py_ssize_t step;
    int entered = enter(self, stream);
    if (entered == REFUSED) return NULL;
    int result = enqueue(self, stream, &step);
    leave(entered);
    if (result && refused(self, step, result, stream)) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef launches_methods[] = {
    {"launch", launch, METH_O, "launch(stream): enqueue; raises what the driver refuses."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot launches_slots[] = {
    {Py_tp_new, new_launches},     {Py_tp_dealloc, free_launches},    {Py_tp_traverse, visit_launches},
    {Py_tp_clear, clear_launches}, {Py_tp_methods, launches_methods}, {Py_tp_doc, "Prepared driver calls."}, {0, NULL},
};
PyType_Spec launches_spec = {"graphdnn._native.Launches", sizeof(Launches), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, launches_slots};
