// Search in pages that are opened from the disk: browsers start no worker there, so its script runs in a hidden frame instead.
// The name tells the theme's plugin `offline` that nothing has to be loaded from elsewhere.
"use strict";
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = this.inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...urls) => {
        for (const one of urls) await this.load(new URL(one, url).href);
      };
      this.ready = this.load(new URL(url, document.baseURI).href);
    }

    load(url) {
      const script = this.inside.document.createElement("script");
      script.src = url;
      this.inside.document.head.append(script);
      return new Promise((loaded, failed) => Object.assign(script, { onload: loaded, onerror: failed }));
    }

    async postMessage(data) {
      await this.ready;
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
