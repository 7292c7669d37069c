// The inner loops that torch's operations leave time in: batch norm, pooling and ReLU in one, thin products with a
// bank of models, hypernetworks and their steps. `loops.inc` holds them, compiled for two instruction sets of x86-64;
// the best that the processor has is chosen when the module is loaded. Elsewhere `levels()` is empty.
//
// Functions take addresses and sizes and trust them: `pfedla.kernels` checks what it passes. Nothing is allocated for
// the caller, and the interpreter's lock is given up meanwhile.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr long RUN = 64;         // pixels that are summed up in single precision
constexpr long FEW = 32;         // clients at most beside a bank
constexpr long TILE = 4096;      // columns at once in a product: the clients' sums of them lie in the second cache
constexpr long STRIP = 16384;    // columns at once in inner products: the clients' changes lie in the second cache
constexpr long PIECE = 256;      // columns that are worked on at once: a few rows of them lie in the first cache
constexpr long AHEAD = 512;      // how many columns ahead the bank is asked for
constexpr long PARTS = 4;        // for each thread: one that comes late leaves its parts to the others
constexpr long ALONE = 1 << 19;  // numbers of a bank below which a second thread costs more than it brings

struct Shape {
    long n, h, w, c;
};

struct Moving {  // parameters, and Adam's moments of them
    float *value, *first, *second;
};

struct Hyper {  // the hypernetworks of all clients
    Moving v, weight1, bias1, weight2, bias2, weight, bias;
    int64_t *body_steps, *head_steps;
    long layers, embedding, hidden, columns;
};

struct Adam {
    double lr, beta1, beta2, epsilon;
};

struct Step {  // what a step's number makes of the rate, and of the root of the second moment
    float rate, root;
    Step(const Adam &adam, int64_t number)
        : rate(adam.lr / (1 - std::pow(adam.beta1, number))), root(1 / std::sqrt(1 - std::pow(adam.beta2, number))) {}
};

struct Loops {  // one instruction set's
    const char *name;
    void (*moments)(const float *, long, long, double *, double *);
    void (*norm_pool)(const float *, Shape, const float *, const float *, float *, float *);
    void (*pool)(const float *, Shape, float *);
    void (*passed)(const float *, const float *, const float *, long, long, double *, double *);
    void (*norm_spread)(const float *, Shape, const float *, const float *, const float *, const float *, const float *,
                        const float *, float *);
    void (*pool_spread)(const float *, Shape, const float *, const float *, const float *, const float *, const float *,
                        const float *, float *);
    void (*product)(const float *, const float *, long, long, long, float *, long, long);
    void (*inner)(const float *, const float *, long, long, long, float *, long, long);
    void (*write_sum)(float *, const int64_t *, const float *, const float *, long, long, long, long);
    void (*forward)(const Hyper &, long, float *);
    void (*climb)(const Hyper &, const Adam &, long, const float *, const bool *);
};

#define LOOPS(name) \
    {#name, moments, norm_pool, pool, passed, spread<true>, spread<false>, product, inner, write_sum, forward, climb}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")
namespace avx2 {
constexpr int LANES = 8;
#include "loops.inc"
constexpr Loops all = LOOPS(avx2);
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi2,prefer-vector-width=512")
namespace avx512 {
constexpr int LANES = 16;
#include "loops.inc"
constexpr Loops all = LOOPS(avx512);
}  // namespace avx512
#pragma GCC pop_options

std::vector<const Loops *> supported() {  // the best first
    std::vector<const Loops *> found;
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")))
        return found;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found.push_back(&avx512::all);
    found.push_back(&avx2::all);
    return found;
}
#else
std::vector<const Loops *> supported() { return {}; }
#endif

const std::vector<const Loops *> levels_here = supported();
const Loops *loops = levels_here.empty() ? nullptr : levels_here[0];

// Threads that wait for work: for a short while busily, for the calls of a round follow each other closely, then
// asleep. A process that was forked has none of its parent's threads, and hires its own.
class Crew {
 public:
    static Crew &here() {             // call it with the interpreter's lock
        static Crew *crew = nullptr;  // never dismissed: its threads end with the process
        if (!crew || crew->process_ != getpid()) crew = new Crew;
        return *crew;
    }

    // Calls work(part) for all parts, in this thread and in others; whoever is free takes the next.
    void run(long parts, long threads, const std::function<void(long)> &work) {
        std::unique_lock<std::mutex> only(running_, std::try_to_lock);
        if (parts < 2 || threads < 2 || !only) {  // others are at it: do without
            for (long part = 0; part < parts; part++) work(part);
            return;
        }
        hire(threads - 1);
        {
            std::lock_guard<std::mutex> guard(sleeping_);
            work_ = &work, parts_ = parts, next_ = 0, wanted_ = threads - 1, busy_ = hired_;
            number_++;
        }
        called_.notify_all();
        take();
        while (busy_) std::this_thread::yield();
    }

 private:
    void hire(long wanted) {
        try {
            for (; hired_ < wanted; hired_++)
                std::thread([this, place = hired_, seen = number_.load()] { serve(place, seen); }).detach();
        } catch (const std::system_error &) {  // the system gives no more: go on with those there are
        }
    }

    void take() {
        for (long part; (part = next_++) < parts_;) (*work_)(part);
    }

    void serve(long place, long seen) {
        for (;;) {
            for (int i = 0; i < PATIENCE && number_ == seen; i++) rest();
            if (number_ == seen) {
                std::unique_lock<std::mutex> guard(sleeping_);
                called_.wait(guard, [&] { return number_ != seen; });
            }
            seen = number_;
            if (place < wanted_) take();
            busy_--;
        }
    }

    static void rest() {
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }

    static constexpr int PATIENCE = 20000;  // rests before it sleeps: about a millisecond
    const pid_t process_ = getpid();
    const std::function<void(long)> *work_ = nullptr;
    std::atomic<long> number_{0}, next_{0}, busy_{0}, parts_{0}, wanted_{0};
    long hired_ = 0;
    std::mutex running_, sleeping_;
    std::condition_variable called_;
};

// Where a part of 0..size begins, a multiple of `grain`.
long bound(long size, long grain, long part, long parts) {
    return std::min(size, (size + grain - 1) / grain * part / parts * grain);
}

// Calls work(i) for all i below n, in several threads.
template <typename Work>
void share(Crew &crew, long n, long threads, const Work &work) {
    const long parts = threads < 2 ? 1 : std::min(n, PARTS * threads);
    crew.run(parts, threads, [&](long part) {
        for (long i = bound(n, 1, part, parts); i < bound(n, 1, part + 1, parts); i++) work(i);
    });
}

template <typename T>
T *at(unsigned long long address) {
    return reinterpret_cast<T *>(address);
}

using Address = unsigned long long;

PyObject *levels(PyObject *, PyObject *) {
    PyObject *names = PyTuple_New(levels_here.size());
    for (size_t i = 0; names && i < levels_here.size(); i++)
        PyTuple_SetItem(names, i, PyUnicode_FromString(levels_here[i]->name));
    return names;
}

PyObject *use(PyObject *, PyObject *args) {
    const char *name;
    if (!PyArg_ParseTuple(args, "s", &name)) return nullptr;
    for (const Loops *some : levels_here)
        if (!strcmp(some->name, name)) {
            loops = some;
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "this processor has no %s", name);
}

PyObject *norm_forward(PyObject *, PyObject *args) {
    Address x, weight, bias, mean, variance, out, best, saved;
    Shape s;
    double momentum, epsilon;
    if (!PyArg_ParseTuple(args, "K(llll)KKKKddKKK", &x, &s.n, &s.h, &s.w, &s.c, &weight, &bias, &mean, &variance,
                          &momentum, &epsilon, &out, &best, &saved))
        return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    const long pixels = s.n * s.h * s.w;
    std::vector<double> found(2 * s.c);
    std::vector<float> affine(2 * s.c);
    float *running_mean = at<float>(mean), *running_variance = at<float>(variance);
    if (saved) {  // in training: of this batch, which the running ones follow
        loops->moments(at<float>(x), pixels, s.c, &found[0], &found[s.c]);
        for (long k = 0; k < s.c; k++) {
            const double v = found[s.c + k] = found[s.c + k] < 0 ? 0 : found[s.c + k];
            running_mean[k] += momentum * (found[k] - running_mean[k]);
            running_variance[k] += momentum * (v * pixels / (pixels - 1) - running_variance[k]);
        }
    } else {
        std::copy_n(running_mean, s.c, &found[0]);
        std::copy_n(running_variance, s.c, &found[s.c]);
    }
    for (long k = 0; k < s.c; k++) {
        const double inverse = 1 / std::sqrt(found[s.c + k] + epsilon);
        affine[k] = at<float>(weight)[k] * inverse;
        affine[s.c + k] = at<float>(bias)[k] - found[k] * affine[k];
        if (saved) at<double>(saved)[k] = found[k], at<double>(saved)[s.c + k] = inverse;
    }
    loops->norm_pool(at<float>(x), s, &affine[0], &affine[s.c], at<float>(out), at<float>(best));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *norm_backward(PyObject *, PyObject *args) {
    Address x, weight, saved, out, best, grad, to_x, to_weight, to_bias;
    Shape s;
    if (!PyArg_ParseTuple(args, "K(llll)KKKKKKKK", &x, &s.n, &s.h, &s.w, &s.c, &weight, &saved, &out, &best, &grad,
                          &to_x, &to_weight, &to_bias))
        return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    const double pixels = s.n * s.h * s.w, *mean = at<double>(saved), *inverse = mean + s.c;
    std::vector<double> found(2 * s.c);
    std::vector<float> affine(3 * s.c);
    loops->passed(at<float>(out), at<float>(best), at<float>(grad), s.n * (s.h / 2) * (s.w / 2), s.c, &found[0],
                  &found[s.c]);
    for (long k = 0; k < s.c; k++) {
        const double scale = at<float>(weight)[k] * inverse[k];
        const double sum = found[k], dot = (found[s.c + k] - mean[k] * sum) * inverse[k];
        const double slope = -scale * inverse[k] * dot / pixels;
        at<float>(to_weight)[k] = dot, at<float>(to_bias)[k] = sum;
        affine[k] = scale, affine[s.c + k] = -scale * sum / pixels - slope * mean[k], affine[2 * s.c + k] = slope;
    }
    loops->norm_spread(at<float>(x), s, at<float>(out), at<float>(best), at<float>(grad), &affine[0], &affine[s.c],
                       &affine[2 * s.c], at<float>(to_x));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *pool_forward(PyObject *, PyObject *args) {
    Address x, out;
    Shape s;
    if (!PyArg_ParseTuple(args, "K(llll)K", &x, &s.n, &s.h, &s.w, &s.c, &out)) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    loops->pool(at<float>(x), s, at<float>(out));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *pool_backward(PyObject *, PyObject *args) {
    Address x, out, grad, to_x;
    Shape s;
    if (!PyArg_ParseTuple(args, "K(llll)KKK", &x, &s.n, &s.h, &s.w, &s.c, &out, &grad, &to_x)) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    loops->pool_spread(at<float>(x), s, at<float>(out), at<float>(out), at<float>(grad), nullptr, nullptr, nullptr,
                       at<float>(to_x));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

struct Layer {  // of a bank, with what it is multiplied with or what it becomes
    Address bank, one, other;
    long count, width;
};

// Reads ((bank, one, other, rows of the bank, numbers in a row), ...).
bool parse_layers(PyObject *tuples, std::vector<Layer> &layers) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuples); i++) {
        Layer layer;
        if (!PyArg_ParseTuple(PyTuple_GetItem(tuples, i), "KKKll", &layer.bank, &layer.one, &layer.other, &layer.count,
                              &layer.width))
            return false;
        layers.push_back(layer);
    }
    return true;
}

// Gives each thread its part of every layer: of the columns or of the rows, as `size` says.
template <typename Work>
void share_layers(Crew &crew, const std::vector<Layer> &layers, long Layer::*size, long grain, long threads,
                  const Work &work) {
    long numbers = 0;
    for (const Layer &layer : layers) numbers += layer.count * layer.width;
    const long parts = numbers < ALONE ? 1 : PARTS * threads;
    crew.run(parts, threads, [&](long part) {
        for (const Layer &layer : layers) {
            const long start = bound(layer.*size, grain, part, parts), end = bound(layer.*size, grain, part + 1, parts);
            if (start < end) work(layer, start, end);
        }
    });
}

// Multiplies something with the bank of each layer, by a loop that works on a part of its rows or columns.
PyObject *multiply(PyObject *args, decltype(Loops::product) loop, long Layer::*size, long grain) {
    PyObject *tuples;
    std::vector<Layer> layers;
    long n, threads;
    if (!PyArg_ParseTuple(args, "O!ll", &PyTuple_Type, &tuples, &n, &threads) || !parse_layers(tuples, layers))
        return nullptr;
    Crew &crew = Crew::here();
    Py_BEGIN_ALLOW_THREADS;
    share_layers(crew, layers, size, grain, threads, [&](const Layer &l, long start, long end) {
        loop(at<float>(l.one), at<float>(l.bank), n, l.count, l.width, at<float>(l.other), start, end);
    });
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *product(PyObject *, PyObject *args) { return multiply(args, loops->product, &Layer::width, 64); }

PyObject *inner(PyObject *, PyObject *args) { return multiply(args, loops->inner, &Layer::count, 4); }

PyObject *write_sum(PyObject *, PyObject *args) {
    PyObject *tuples;
    std::vector<Layer> layers;
    Address ids;
    long n, threads;
    if (!PyArg_ParseTuple(args, "O!Kll", &PyTuple_Type, &tuples, &ids, &n, &threads) || !parse_layers(tuples, layers))
        return nullptr;
    Crew &crew = Crew::here();
    Py_BEGIN_ALLOW_THREADS;
    share_layers(crew, layers, &Layer::width, 64, threads, [&](const Layer &l, long start, long end) {
        loops->write_sum(at<float>(l.bank), at<int64_t>(ids), at<float>(l.one), at<float>(l.other), n, l.width, start,
                         end);
    });
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

// (values, first moments, second moments) of v, weight1, bias1, weight2, bias2, weight, bias
bool parse_hyper(PyObject *addresses, Hyper &net) {
    Moving *parts[] = {&net.v, &net.weight1, &net.bias1, &net.weight2, &net.bias2, &net.weight, &net.bias};
    if (!PyTuple_Check(addresses) || PyTuple_Size(addresses) != 21) {
        PyErr_SetString(PyExc_TypeError, "a hypernetwork has 21 addresses");
        return false;
    }
    for (int i = 0; i < 21; i++) {
        const Address address = PyLong_AsUnsignedLongLong(PyTuple_GetItem(addresses, i));
        if (PyErr_Occurred()) return false;
        Moving &part = *parts[i % 7];
        (i < 7 ? part.value : i < 14 ? part.first : part.second) = at<float>(address);
    }
    return true;
}

PyObject *forward(PyObject *, PyObject *args) {
    PyObject *addresses;
    Address ids, alpha;
    Hyper net{};
    long n, threads;
    if (!PyArg_ParseTuple(args, "O(llll)KlKl", &addresses, &net.layers, &net.embedding, &net.hidden, &net.columns, &ids,
                          &n, &alpha, &threads) ||
        !parse_hyper(addresses, net))
        return nullptr;
    Crew &crew = Crew::here();
    Py_BEGIN_ALLOW_THREADS;
    const long size = net.layers * net.columns;
    share(crew, n, n * size * net.hidden < ALONE ? 1 : threads,
          [&](long i) { loops->forward(net, at<int64_t>(ids)[i], at<float>(alpha) + i * size); });
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *climb(PyObject *, PyObject *args) {
    PyObject *addresses;
    Address ids, g, sent, body_steps, head_steps;
    Hyper net{};
    Adam adam;
    long n, threads;
    if (!PyArg_ParseTuple(args, "O(llll)KK(dddd)KlKKl", &addresses, &net.layers, &net.embedding, &net.hidden,
                          &net.columns, &body_steps, &head_steps, &adam.lr, &adam.beta1, &adam.beta2, &adam.epsilon,
                          &ids, &n, &g, &sent, &threads) ||
        !parse_hyper(addresses, net))
        return nullptr;
    Crew &crew = Crew::here();
    Py_BEGIN_ALLOW_THREADS;
    const long size = net.layers * net.columns;
    net.body_steps = at<int64_t>(body_steps), net.head_steps = at<int64_t>(head_steps);
    share(crew, n, n * size * net.hidden < ALONE ? 1 : threads, [&](long i) {
        loops->climb(net, adam, at<int64_t>(ids)[i], at<float>(g) + i * size, at<bool>(sent) + i * net.layers);
    });
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"levels", levels, METH_NOARGS, "Return the instruction sets that this processor has loops for, the best first."},
    {"use", use, METH_VARARGS, "Take the loops for another of `levels()`."},
    {"norm_forward", norm_forward, METH_VARARGS, "Batch norm, 2x2 max-pooling and ReLU."},
    {"norm_backward", norm_backward, METH_VARARGS, "Gradients of norm_forward in training."},
    {"pool_forward", pool_forward, METH_VARARGS, "2x2 max-pooling and ReLU."},
    {"pool_backward", pool_backward, METH_VARARGS, "Gradient of pool_forward."},
    {"product", product, METH_VARARGS, "weights @ rows."},
    {"inner", inner, METH_VARARGS, "delta @ rows.T."},
    {"write_sum", write_sum, METH_VARARGS, "rows[ids] = one + other."},
    {"forward", forward, METH_VARARGS, "Aggregation weights from hypernetworks."},
    {"climb", climb, METH_VARARGS, "A step of Adam for hypernetworks."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_compiled", "Compiled inner loops.", 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__compiled() { return PyModule_Create(&definition); }
