// Browsers refuse workers to pages that are opened as files, and the search of the site is a worker:
// on such pages it runs in a hidden frame, which has what the search uses of a worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      inside.importScripts = async (...urls) => {
        for (const each of urls) await load(inside, each);
      };
      this.frame = frame;
      this.started = load(inside, url);
    }

    async postMessage(data) {
      await this.started;
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
    }

    terminate() {
      this.frame.remove();
    }
  };

  function load(inside, url) {
    return new Promise((resolve, reject) => {
      const script = inside.document.createElement("script");
      script.src = new URL(url, location.href).href;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${script.src} cannot be read`));
      inside.document.body.append(script);
    });
  }
}
